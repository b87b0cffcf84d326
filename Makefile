# What a user and a contributor type. Needs Rust (stable) and a C compiler; the rest is installed
# by scripts/install-peers. `make help` lists the targets.

CARGO ?= cargo
# mkfs and its kin live where an ordinary user's PATH does not look.
export PATH := $(PATH):/usr/local/sbin:/usr/sbin:/sbin

.DEFAULT_GOAL := help
# Recipes are cargo calls that use every core themselves, and their order matters.
.NOTPARALLEL:
.PHONY: help build demo install install-qemu-names lib install-lib c-header wheel deb tarball reproducible test-packages audit test peers lint doc publish-check semver unit bench python-bench python-readers qemu-compat fuzz clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

# Where cargo puts what it builds.
TARGET = $(or $(CARGO_TARGET_DIR),target)

build: ## the command, at target/release/vdkit
	$(CARGO) build --release --locked --package vdkit-cli

demo: ## builds, then converts and checks an image made of this machine's own files
	scripts/demo

# Where `make install` puts things. DESTDIR is put before it, for those who make packages.
PREFIX ?= /usr/local
PLACE = $(DESTDIR)$(PREFIX)

install: build ## the command, man pages and completions, below PREFIX (/usr/local)
	install -D -m 755 $(TARGET)/release/vdkit $(PLACE)/bin/vdkit
	install -d $(PLACE)/share/man/man1 $(PLACE)/share/bash-completion/completions \
		$(PLACE)/share/zsh/site-functions $(PLACE)/share/fish/vendor_completions.d
	$(TARGET)/release/vdkit man $(PLACE)/share/man/man1
	$(TARGET)/release/vdkit completions bash > $(PLACE)/share/bash-completion/completions/vdkit
	$(TARGET)/release/vdkit completions zsh > $(PLACE)/share/zsh/site-functions/_vdkit
	$(TARGET)/release/vdkit completions fish > $(PLACE)/share/fish/vendor_completions.d/vdkit.fish

install-qemu-names: ## links qemu-img and qemu-nbd to the installed vdkit; QEMU's own stay without REPLACE=1
	scripts/install-qemu-names $(PLACE)/bin $(if $(REPLACE),--replace)

LIBRARY = target/libvdkit
lib: ## the C library, at target/libvdkit
	scripts/make-libvdkit $(LIBRARY) $(PREFIX)

install-lib: lib ## the C library, header, manual pages and pkg-config file, below PREFIX
	install -D -m 644 -t $(PLACE)/lib $(LIBRARY)/libvdkit.a
	install -D -m 644 -t $(PLACE)/lib/pkgconfig $(LIBRARY)/vdkit.pc
	install -D -m 644 -t $(PLACE)/include bindings/c/include/vdkit.h
	@# A new file, not one written over the one that running programs use; and no older version's.
	file=$$(readlink $(LIBRARY)/libvdkit.so.0) && \
		install -m 755 -t $(PLACE)/lib $(LIBRARY)/$$file && \
		ln -sfn $$file $(PLACE)/lib/libvdkit.so.0 && ln -sfn libvdkit.so.0 $(PLACE)/lib/libvdkit.so
	scripts/c-manual $(PLACE)/share/man/man3
	@# The loader finds libraries below /usr/local by its cache alone.
	[ -n "$(DESTDIR)" ] || PATH=$$PATH:/usr/sbin:/sbin ldconfig || echo "install-lib: run ldconfig as root" >&2

wheel: ## the Python package as a wheel, in target/package; pip fetches maturin for it
	@# maturin puts what has these names into the wheel.
	cp LICENSE-MIT LICENSE-APACHE bindings/python
	scripts/dependencies licenses vdkit-python > bindings/python/NOTICE-third-party
	$(or $(PYTHON3),python3) -m pip wheel --no-deps --wheel-dir target/package bindings/python

deb: ## Debian packages of the command and the libraries, in target/package
	scripts/make-debs

tarball: ## the command as one static program with man pages, licenses and a bill of materials, in target/package
	scripts/make-tarball

reproducible: ## builds all packages twice, from two folders, and compares them byte by byte
	scripts/reproducible

test-packages: deb tarball ## installs these packages in a small Debian, uses and removes them; checks the tarball
	VDKIT_PACKAGES=$(CURDIR)/target/package $(CARGO) test --locked --package vdkit-cli --test packages -- --include-ignored

audit: ## licenses, sources and duplicates of all crates, by cargo-deny; ADVISORIES=1: known faults too
	@command -v cargo-deny >/dev/null || { echo "make audit: cargo-deny is missing: cargo install --locked cargo-deny" >&2; exit 1; }
	$(CARGO) deny check -D unmatched-skip licenses bans sources $(if $(ADVISORIES),advisories)

test: peers lint doc publish-check unit ## everything that must hold: installs the peers, then format, lints, documents, crates, tests

peers: ## installs the programs that the tests compare with (QEMU's tools and others), fetches a guest and a Debian
	scripts/install-peers
	scripts/fetch-guest
	scripts/fetch-debian

lint: ## format and lints, with warnings as errors
	$(CARGO) fmt --all -- --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	scripts/pictures check

doc: ## builds the documentation, with warnings as errors, and runs its examples
	RUSTDOCFLAGS=-Dwarnings $(CARGO) doc --no-deps --workspace --locked
	$(CARGO) test --workspace --locked --doc

# Last in `make test`, so that its output ends with the test runner's own closing lines.
unit: ## unit, model, crash, oracle and command tests
	$(CARGO) build --workspace --locked --examples --profile test
	$(CARGO) test --workspace --locked --lib --bins --tests

bench: build ## measures vdkit beside qemu-img; BENCH='--quick --group null' passes arguments
	$(CARGO) run --release --locked --package vdkit-bench -- $(BENCH)

# The package as it stands in the sources, with what cargo builds.
PYTHON = target/peers/python/bin/python3
PYTHON_PACKAGE = target/python-package
.PHONY: python-package
python-package:
	$(CARGO) build --profile library --locked --package vdkit-python
	rm -rf $(PYTHON_PACKAGE) && mkdir -p $(PYTHON_PACKAGE)
	cp -r bindings/python/python/vdkit $(PYTHON_PACKAGE)/vdkit
	cp $(TARGET)/library/lib_vdkit.so $(PYTHON_PACKAGE)/vdkit/_vdkit.abi3.so

python-bench: python-package ## times the Python package beside dissect and libyal; BENCH='--mib 64' passes arguments
	PYTHONPATH=$(PYTHON_PACKAGE) $(PYTHON) bindings/python/benches/readers.py $(BENCH)

python-readers: python-package ## reads IMAGES (10000) random images by the Python package, dissect and libyal
	PYTHONPATH=$(PYTHON_PACKAGE) $(PYTHON) -m pytest -q -s -p no:cacheprovider --import-mode=importlib \
		bindings/python/tests/test_readers.py --images $(or $(IMAGES),10000)

qemu-compat: ## writes docs/qemu-compat.md from the table of differences that are left
	VDKIT_UPDATE_PAGE=1 $(CARGO) test --locked --package vdkit-cli --test qemu_differential the_page

c-header: ## writes bindings/c/include/vdkit.h from the sources of the C library
	VDKIT_UPDATE_PAGE=1 $(CARGO) test --locked --package vdkit-c --test c the_header_is_made

# cargo unpacks and builds a version of a crate once, but ours change within a version.
# Without debug information, as the workspace's own profile has it, which packed crates do not see.
publish-check: ## packs and builds each crate as it would be published, in order, and publishes nothing
	rm -rf "$${CARGO_HOME:-$$HOME/.cargo}"/registry/src/-*/vdkit-* target/publish/debug/.fingerprint/vdkit-*
	CARGO_PROFILE_DEV_DEBUG=false $(CARGO) publish --dry-run --workspace --locked --allow-dirty --target-dir target/publish

# Tags of releases are v0.1.0, ... A commit will do, too.
BASELINE ?= $(shell git describe --tags --match 'v*' --abbrev=0 2>/dev/null)
semver: ## compares the crates' interfaces with those of the last release, by cargo-semver-checks; BASELINE=COMMIT: with that one's
	@command -v cargo-semver-checks >/dev/null || { echo "make semver: cargo-semver-checks is missing: cargo install --locked cargo-semver-checks" >&2; exit 1; }
	@[ -n "$(BASELINE)" ] || { echo "make semver: there is no release yet; give a commit: make semver BASELINE=COMMIT" >&2; exit 1; }
	$(CARGO) semver-checks --workspace --baseline-rev $(BASELINE)

fuzz: ## fuzzes each target for FUZZ_SECONDS (60) with the nightly toolchain
	scripts/fuzz $(or $(FUZZ_SECONDS),60) $(FUZZ_TARGETS)

clean: ## removes what was built
	$(CARGO) clean
