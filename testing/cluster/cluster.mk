# A Kubernetes on this machine, for the tests and by hand; the top Makefile includes this.
# Everything is built from Go modules, once, into ~/.cache/paceline (PACELINE_CLUSTER_CACHE); go's
# own GOMAXPROCS bounds the cores. Programs in KUBEBUILDER_ASSETS are used instead where they exist.
.PHONY: cluster-programs programs-for-tests cluster cluster-down images test-nodes test-kubernetes
CLUSTER := $(BIN)/python -m testing.cluster

cluster-programs: install ## build Kubernetes and install what real nodes need (minutes, once)
	@$(CLUSTER) programs

programs-for-tests: install
	@$(CLUSTER) programs-for-tests

cluster: cluster-programs ## start a Kubernetes with two nodes, keep it, print its kubeconfig
	@$(CLUSTER) up

cluster-down: ## end the cluster that `make cluster` started
	@$(CLUSTER) down

images: install ## build Paceline's images for real, with docker or buildah (TORCH=cpu TORCH_SHA256=...: without CUDA)
	@$(CLUSTER) images

test-nodes: cluster-programs ## jobs in real pods on two nodes, with everything that may happen to them
	@$(PYTEST) tests/nodes

# What an API server says word by word is recorded of the pinned release; that it says where, and what
# to do, is asked of each.
WORDS := tests/operator/real/test_specs.py::test_the_words_are_as_recorded

test-kubernetes: install ## the tests on an API server, on another release: VERSION=v1.35.4
	@test -n "$(VERSION)" || { echo "error: say which release, like VERSION=v1.35.4" >&2; exit 2; }
	@PACELINE_KUBERNETES=$(VERSION) $(CLUSTER) programs-without-nodes
	@PACELINE_KUBERNETES=$(VERSION) $(PYTEST) --deselect $(WORDS) \
		tests/cluster/test_control_plane.py tests/operator/real
