// CoreDNS with what a test cluster needs of it; the whole one brings the clients of five clouds.
// A module of its own, since it asks for other versions than Kubernetes does.
package main

import (
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
)

func main() { coremain.Run() }
