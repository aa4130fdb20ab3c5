// etcd, built from its Go module: Debian 12's 3.4 holds back the first events of a watch.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
