# FreeFlow: what to build and how to check it. `make help` lists the targets.
#
# CARGO_TARGET_DIR and CARGO are honoured. Results go to dist/.

CARGO ?= cargo
TARGET_DIR := $(abspath $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target))
DIST := $(abspath $(if $(FREEFLOW_DIST),$(FREEFLOW_DIST),dist))
HOST := $(shell rustc -vV 2>/dev/null | sed -n 's/^host: //p')
# The programs are static: one file works on any distribution, and as a hook in a container runtime's clean environment.
# The flag holds for the target only, so that procedural macros still build. FREEFLOW_RUSTFLAGS is scripts/build-packages'.
STATIC_FLAGS := CARGO_TARGET_$(shell echo '$(HOST)' | tr 'a-z-' 'A-Z_')_RUSTFLAGS="-C target-feature=+crt-static $(FREEFLOW_RUSTFLAGS)"
PROGRAMS := freeflow freeflow-router freeflow-kubernetes freeflow-guest
export CARGO_TARGET_DIR := $(TARGET_DIR)
export FREEFLOW_DIST := $(DIST)

.PHONY: all build programs library headers demo demo-cluster test test-full test-interop test-images test-vm test-engines test-sanitizers test-kubernetes test-packages packages bench bench-containers fmt lint deps clean help
.DEFAULT_GOAL := all

all: build ## build dist/bin, dist/lib and dist/include
	@echo "built $(DIST): bin/freeflow, bin/freeflow-router, bin/freeflow-kubernetes, bin/freeflow-guest, lib/libibverbs.so.1, lib/librdmacm.so.1, lib/rsocket/librspreload.so"

build: programs library headers

programs:
	@command -v $(CARGO) >/dev/null || { echo "make: cargo is missing: install a stable Rust toolchain, 1.95 or newer" >&2; exit 1; }
	$(STATIC_FLAGS) $(CARGO) build --quiet --release --locked --target $(HOST) -p freeflow-cli -p freeflow-router -p freeflow-kubernetes -p freeflow-guest
	@for program in $(PROGRAMS); do \
	    scripts/install-program $(TARGET_DIR)/$(HOST)/release/$$program $(DIST)/bin || exit 1; \
	done
	@ln -sf freeflow $(DIST)/bin/freeflow-runtime
	@ln -sf freeflow $(DIST)/bin/freeflow-cni

library:
	scripts/link-ibverbs $(DIST)/lib
	scripts/link-rdmacm $(DIST)/lib
	scripts/link-rspreload $(DIST)/lib

headers:
	@mkdir -p $(DIST)/include
	@cp -R crates/ibverbs/include/. $(DIST)/include/

demo: ## install what is missing, build, and run perftest between containers
	scripts/demo.sh

demo-cluster: build ## three hosts that follow one declaration on etcd, and perftest between two of them
	scripts/demo-cluster

test: ## everything that CI runs, with the time of each stage
	scripts/install-deps
	scripts/test-stages

test-full: ## the same with longer runs of what is random
	scripts/install-deps
	FREEFLOW_TEST_FULL=1 scripts/test-stages

test-interop: build ## compare with a real kernel's Soft-RoCE, in an emulated guest
	/usr/bin/python3 -m pytest -v tests/interop/test_recording.py
	/usr/bin/python3 -m pytest -v --full tests/interop/test_external.py tests/interop/test_cm_external.py

test-vm: build ## a virtual machine with a vNIC, in software emulation; no KVM is needed
	scripts/rxe-guest --packages
	scripts/test-stages vm-guest

test-images: build ## containers with root file systems of several Linux releases; downloads these
	/usr/bin/python3 -m pytest -v tests/images

test-sanitizers: build ## libibverbs and the C test programs under AddressSanitizer
	scripts/test-stages sanitizers

test-engines: build ## Docker 20.10 and 26.1, containerd 1.6 and 1.7, which it fetches once
	scripts/test-stages engines

test-kubernetes: build ## a real Kubernetes, containerd 2 and FreeFlow on one node; builds these once, with Go
	scripts/install-deps kubernetes
	scripts/test-stages kubernetes

packages: ## Debian packages, rpms, a tarball and an OCI image, in dist/packages
	scripts/build-packages

test-packages: ## all of them installed and run; systemd in an emulated guest; two builds compared
	scripts/install-deps packages
	scripts/test-packages

bench-containers: build ## what a vNIC adds to a container's start, one and 100 at once, beside plain podman
	scripts/bench-containers

bench: build ## latency, bandwidth and CPU beside this machine's own limits
	scripts/bench

fmt: ## format the sources
	$(CARGO) fmt --all

lint: ## the checks that need no build of the programs
	scripts/test-stages format clippy dependencies style

deps: ## install the system packages that building and testing need
	scripts/install-deps

clean: ## remove what was built
	$(CARGO) clean
	rm -rf $(DIST)

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
