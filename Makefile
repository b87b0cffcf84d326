# What a user and a contributor type. Needs Rust (stable) and a C compiler; the rest is installed
# by scripts/install-peers. `make help` lists the targets.

CARGO ?= cargo
comma := ,
# mkfs and its kin live where an ordinary user's PATH does not look.
export PATH := $(PATH):/usr/local/sbin:/usr/sbin:/sbin

.DEFAULT_GOAL := help
# Recipes are cargo calls that use every core themselves, and their order matters.
.NOTPARALLEL:
.PHONY: help build demo test peers lint doc unit bench fuzz clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

# Loading shared libraries takes a third of a short run, so the command is linked statically where
# the C library can be.
LIBC_A := $(wildcard $(shell cc -print-file-name=libc.a))
STATIC := $(if $(LIBC_A),-C target-feature=+crt-static)
# What it does first is to relocate itself: 28,000 addresses, which the C library takes from 2.36 on
# as a bitmap instead of entries of 24 bytes. A tenth of a short run.
RELR := $(shell getconf GNU_LIBC_VERSION 2>/dev/null | awk '$$2 >= 2.36 { print "yes" }')
PACKED := $(if $(RELR),-C link-arg=-Wl$(comma)-z$(comma)pack-relative-relocs)

# What a short run executes lies together: an eighth of its time.
ORDERED := -C linker=$(CURDIR)/scripts/link-in-order

build: ## the command, at target/release/vdkit
	$(CARGO) rustc --release --locked --package vdkit-cli --bin vdkit -- $(STATIC) $(PACKED) $(ORDERED)

demo: ## builds, then converts and checks an image made of this machine's own files
	scripts/demo

test: peers lint doc unit ## everything that must hold: installs the peers, then format, lints, documents, tests

peers: ## installs the programs that the tests compare with (QEMU's tools and others), fetches a guest
	scripts/install-peers
	scripts/fetch-guest

lint: ## format and lints, with warnings as errors
	$(CARGO) fmt --all -- --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	scripts/pictures check

doc: ## builds the documentation, with warnings as errors, and runs its examples
	RUSTDOCFLAGS=-Dwarnings $(CARGO) doc --no-deps --workspace --locked
	$(CARGO) test --workspace --locked --doc

# Last in `make test`, so that its output ends with the test runner's own closing lines.
unit: ## unit, model, crash, oracle and command tests
	$(CARGO) test --workspace --locked --lib --bins --tests --examples

bench: build ## measures vdkit beside qemu-img; BENCH='--quick --group null' passes arguments
	$(CARGO) run --release --locked --package vdkit-bench -- $(BENCH)

fuzz: ## fuzzes each target for FUZZ_SECONDS (60) with the nightly toolchain
	scripts/fuzz $(or $(FUZZ_SECONDS),60) $(FUZZ_TARGETS)

clean: ## removes what was built
	$(CARGO) clean
