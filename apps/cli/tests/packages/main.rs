//! The packages, as people get them: made of the programs that cargo built for tests, or those of VDKIT_PACKAGES, the
//! folder where `make deb` and `make tarball` put the real ones (`make test-packages`).

mod tarball;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

use vdkit_cli::commands::all;
use vdkit_testkit::{impossible_here, missing, python, require_peer};

const DEV: &str = "libvdkit-dev";
const NAMES: [&str; 4] = ["vdkit", "libvdkit0", DEV, "python3-vdkit"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Asks for success.
fn must(command: &mut Command) -> Output {
    let done = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(done.status.success(), "{command:?}: {}{}", text(&done.stdout), text(&done.stderr));
    done
}

fn said(command: &mut Command) -> String {
    text(&must(command).stdout)
}

/// The packages in a folder.
struct Made {
    folder: PathBuf,
    /// Made for this test; else those of VDKIT_PACKAGES.
    made_here: bool,
}

static MADE: LazyLock<Option<Made>> = LazyLock::new(Made::new);

impl Made {
    fn new() -> Option<Self> {
        if let Some(folder) = std::env::var_os("VDKIT_PACKAGES") {
            return Some(Self { folder: folder.into(), made_here: false });
        }
        let tools = ["dpkg-deb", "dpkg-shlibdeps", "strip"];
        if !tools.iter().all(|tool| require_peer(tool)) {
            return None;
        }
        // (A temporary folder would stay: nothing drops a static.)
        let scratch = Path::new(env!("CARGO_TARGET_TMPDIR")).join("packages");
        let _ = std::fs::remove_dir_all(&scratch);
        let (programs, folder) = (scratch.join("programs"), scratch.join("made"));
        std::fs::create_dir_all(&programs).unwrap();
        let link = |from: &Path, name| {
            std::os::unix::fs::symlink(from, programs.join(name)).unwrap();
        };
        link(Path::new(env!("CARGO_BIN_EXE_vdkit")), "vdkit");
        link(&newest("libvdkit_c", ".a"), "libvdkit_c.a");
        link(&newest("lib_vdkit", ".so"), "lib_vdkit.so");
        let mut make = Command::new(root().join("scripts/make-debs"));
        must(make.env("PROGRAMS", &programs).env("OUTPUT", &folder).env("LEVEL", "1"));
        Some(Self { folder, made_here: true })
    }

    fn packages(&self) -> Vec<PathBuf> {
        NAMES.iter().map(|name| self.package(name)).collect()
    }

    fn package(&self, name: &str) -> PathBuf {
        let start = format!("{name}_");
        let entries = std::fs::read_dir(&self.folder).unwrap();
        let mut files = entries.map(|entry| entry.unwrap().path()).filter(|path| {
            let file = path.file_name().unwrap().to_string_lossy();
            file.starts_with(&start) && file.ends_with(".deb")
        });
        let found = files.next().unwrap_or_else(|| panic!("{name} in {}", self.folder.display()));
        assert_eq!(files.next(), None, "an older package is there too");
        found
    }

    fn files(&self, name: &str) -> Vec<String> {
        let listing = said(Command::new("dpkg-deb").arg("-c").arg(self.package(name)));
        let path = |line: &str| line.split_whitespace().nth(5).unwrap().to_owned();
        for line in listing.lines() {
            assert!(line.contains(" root/root "), "{line}");
        }
        listing.lines().map(path).collect()
    }

    fn field(&self, name: &str, field: &str) -> String {
        let package = self.package(name);
        said(Command::new("dpkg-deb").arg("-f").arg(package).arg(field)).trim().to_owned()
    }
}

/// A library that cargo built for this test, which stands beside it.
fn newest(start: &str, end: &str) -> PathBuf {
    let here = std::env::current_exe().unwrap();
    std::fs::read_dir(here.parent().unwrap())
        .unwrap()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            name.starts_with(start) && name.ends_with(end)
        })
        .max_by_key(|path| path.metadata().and_then(|found| found.modified()).ok())
        .unwrap_or_else(|| panic!("cargo built no {start}*{end}"))
}

#[test]
fn the_packages_have_what_users_look_for() {
    let Some(made) = &*MADE else { return };
    let files = made.files("vdkit");
    for entry in all() {
        let page = format!("./usr/share/man/man1/vdkit-{}.1.gz", entry.name);
        assert!(files.contains(&page), "{page}");
    }
    for file in [
        "./usr/bin/vdkit",
        "./usr/share/bash-completion/completions/vdkit",
        "./usr/share/zsh/vendor-completions/_vdkit",
        "./usr/share/fish/vendor_completions.d/vdkit.fish",
        "./usr/lib/systemd/system/vdkit-serve@.service",
        "./usr/lib/systemd/system/vdkit-serve@.socket",
        "./usr/share/doc/vdkit/copyright",
        "./usr/share/doc/vdkit/changelog.gz",
        "./usr/share/doc/vdkit/third-party-licenses.txt.gz",
    ] {
        assert!(files.iter().any(|found| found == file), "{file}");
    }
    let pages = made.files(DEV);
    for page in ["libvdkit", "vdkit_open", "vdkit_convert"] {
        assert!(pages.contains(&format!("./usr/share/man/man3/{page}.3.gz")), "{page}");
    }
    let python = made.files("python3-vdkit");
    assert!(python.iter().any(|file| file.ends_with("dist-packages/vdkit/_vdkit.abi3.so")));
    for name in ["vdkit", "libvdkit0", "python3-vdkit"] {
        assert!(made.field(name, "Depends").contains("libc6 (>= "), "{name}");
    }
    let exact = format!("libvdkit0 (= {})", made.field("libvdkit0", "Version"));
    assert_eq!(made.field(DEV, "Depends"), exact);
}

#[test]
fn lintian_has_nothing_to_say() {
    let Some(made) = &*MADE else { return };
    if !require_peer("lintian") {
        return;
    }
    let mut lintian = Command::new("lintian");
    lintian.args(["--fail-on", "error,warning", "--allow-root", "--tag-display-limit", "0"]);
    // A static library takes it minutes: only that of a release build.
    let released = !made.made_here;
    let packages = made.packages().into_iter();
    let done = must(lintian.args(packages.filter(|p| released || *p != made.package(DEV))));
    assert_eq!(text(&done.stdout), "");
}

/// `cargo deb` packs the same files: those that `scripts/make-debs --stage` lays out.
#[test]
fn cargo_deb_knows_the_same_package() {
    let Some(made) = &*MADE else { return };
    let mut metadata = Command::new(env!("CARGO"));
    metadata.args(["metadata", "--format-version", "1", "--no-deps", "--offline"]);
    let all = said(metadata.current_dir(root()));
    let all: serde_json::Value = serde_json::from_str(&all).unwrap();
    let ours = all["packages"].as_array().unwrap().iter().find(|p| p["name"] == "vdkit-cli");
    let synopsis = made.field("vdkit", "Description");
    assert_eq!(synopsis.lines().next(), ours.unwrap()["description"].as_str());
    let deb = &ours.unwrap()["metadata"]["deb"];
    assert_eq!(deb["name"], "vdkit");
    let folders: Vec<&str> = deb["assets"]
        .as_array()
        .unwrap()
        .iter()
        .map(|asset| {
            let (from, to) = (asset[0].as_str().unwrap(), asset[1].as_str().unwrap());
            assert!(from.contains(&format!("/stage/vdkit/{to}")), "{asset}");
            to
        })
        .collect();
    for file in made.files("vdkit") {
        let known = |folder: &&str| file.starts_with(&format!("./{folder}"));
        assert!(file.ends_with('/') || folders.iter().any(known), "{file} is in no asset");
    }
    let control = std::fs::read_to_string(root().join("packaging/debian/control")).unwrap();
    for key in ["section", "suggests"] {
        let value = deb[key].as_str().unwrap();
        assert_eq!(made.field("vdkit", key), value, "{key}");
    }
    let about = deb["extended-description"].as_str().unwrap();
    let words = |text: &str| {
        text.split_whitespace().filter(|word| *word != ".").collect::<Vec<_>>().join(" ")
    };
    assert!(words(&control).contains(&words(about)), "{about}");
}

/// The units in a folder, with a program where they look for it, so that systemd-analyze judges
/// nothing else.
fn units() -> tempfile::TempDir {
    let scratch = tempfile::tempdir().unwrap();
    for name in ["vdkit-serve@.service", "vdkit-serve@.socket"] {
        let unit = std::fs::read_to_string(root().join("packaging/systemd").join(name)).unwrap();
        let here = unit.replace("/usr/bin/vdkit", env!("CARGO_BIN_EXE_vdkit"));
        // Where the package is not installed, neither are its pages.
        let pages = |line: &&str| !line.starts_with("Documentation=");
        let here: Vec<&str> = here.lines().filter(pages).collect();
        std::fs::write(scratch.path().join(name), here.join("\n") + "\n").unwrap();
    }
    scratch
}

#[test]
fn systemd_finds_no_fault_in_the_units() {
    if !require_peer("systemd-analyze") {
        return;
    }
    let units = units();
    let mut verify = Command::new("systemd-analyze");
    verify.args(["verify", "vdkit-serve@one.socket", "vdkit-serve@one.service"]);
    verify.env("SYSTEMD_UNIT_PATH", format!("{}:", units.path().display()));
    let done = must(verify.current_dir(units.path()));
    assert_eq!(text(&done.stdout) + &text(&done.stderr), "");
}

#[test]
fn the_service_is_confined() {
    if !require_peer("systemd-analyze") {
        return;
    }
    let units = units();
    let mut security = Command::new("systemd-analyze");
    // In tenths.
    security.args(["security", "--offline=true", "--threshold=30", "vdkit-serve@.service"]);
    security.current_dir(units.path());
    let told = said(&mut security);
    assert!(told.contains("Overall exposure level for vdkit-serve@"), "{told}");
}

/// A small Debian in a folder of its own.
struct Debian(tempfile::TempDir);

impl Debian {
    fn new() -> Option<Self> {
        let tools = ["debootstrap", "zstd"].iter().all(|tool| require_peer(tool));
        if !tools {
            return None;
        }
        if !rustix::process::geteuid().is_root() {
            missing("this test makes a Debian in a folder", "run it as root");
            return None;
        }
        let archive = said(Command::new(root().join("scripts/fetch-debian")).arg("--path"));
        if archive.is_empty() {
            missing("there is no Debian to install packages in", "see scripts/fetch-debian");
            return None;
        }
        // Device nodes and the size: not /tmp, which may be in memory.
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let mut unpack = Command::new("tar");
        unpack.args(["--zstd", "--numeric-owner", "-xf", archive.trim()]);
        must(unpack.current_dir(folder.path()));
        // Others than root live in it too.
        must(Command::new("chmod").arg("755").arg(folder.path()));
        Some(Self(folder))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn copy(&self, from: &Path, to: &str) {
        let to = self.path(to);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(from, &to).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    }

    /// Runs a script of tests/packages inside.
    fn run(&self, script: &str) -> String {
        self.copy(&root().join("apps/cli/tests/packages").join(script), "root/script");
        let mut inside = Command::new("unshare");
        inside.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--root"]);
        inside.arg(self.0.path()).args(["bash", "/root/script"]).env_clear();
        said(inside.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("HOME", "/root"))
    }

    /// All names in it, without what dpkg and its tools note about their work.
    fn names(&self) -> BTreeSet<String> {
        let mut find = Command::new("find");
        let noted = ["./var/lib/dpkg", "./var/log", "./var/cache", "./root", "./tmp", "./proc"];
        find.arg(".");
        for folder in noted {
            find.args(["-path", folder, "-prune", "-o"]);
        }
        let listing = said(find.arg("-print").current_dir(self.0.path()));
        listing.lines().map(str::to_owned).collect()
    }
}

#[test]
fn a_debian_runs_what_is_installed_and_gets_rid_of_it() {
    let Some(made) = &*MADE else { return };
    let Some(debian) = Debian::new() else { return };
    let before = debian.names();
    for package in made.packages() {
        let name = package.file_name().unwrap().to_str().unwrap();
        debian.copy(&package, &format!("root/packages/{name}"));
    }
    for file in ["README.md", "scripts/readme-examples"] {
        debian.copy(&root().join(file), &format!("root/source/{file}"));
    }
    let told = debian.run("use.sh");
    assert!(told.contains("examples ran"), "{told}");
    if require_peer("systemd-nspawn") {
        boot(&debian);
    }
    debian.run("remove.sh");
    let after = debian.names();
    let left: Vec<&String> = after.difference(&before).collect();
    let lost: Vec<&String> = before.difference(&after).collect();
    assert!(left.is_empty() && lost.is_empty(), "left {left:?}, lost {lost:?}");
}

/// Boots it in a container, where the units serve an image.
fn boot(debian: &Debian) {
    let folder = root().join("apps/cli/tests/packages");
    debian.copy(&folder.join("units.sh"), "root/units.sh");
    debian.copy(&folder.join("check.service"), "etc/systemd/system/check.service");
    let before = debian.names();
    let mut container = Command::new("timeout");
    container.args(["--kill-after=10", "300", "systemd-nspawn", "--quiet", "--boot"]);
    container.args(["--register=no", "--keep-unit", "--private-network", "--directory"]);
    container.arg(debian.0.path()).args(["--", "--unit=check.service"]);
    let done = container.output().unwrap();
    let told = std::fs::read_to_string(debian.path("root/units.log"));
    let Ok(told) = told else {
        let console = text(&done.stdout) + &text(&done.stderr);
        let began = done.status.code() == Some(124) || console.contains("Welcome to");
        assert!(!began, "systemd began to boot, and no unit was tried: {console}");
        impossible_here(&format!("systemd does not boot in a container here: {console}"));
        return;
    };
    assert!(told.ends_with("the units serve\n"), "{told}");
    // Its images and what names them are the administrator's: so are the notes of a boot.
    let booted: Vec<String> = debian.names().difference(&before).cloned().collect();
    let kept = |name: &str| name.contains("vdkit") && !name.contains("systemd-private");
    for name in booted.iter().rev().filter(|name| !kept(name)) {
        let path = debian.path(name);
        let _ = std::fs::remove_file(&path).or_else(|_| std::fs::remove_dir(&path));
    }
    std::fs::remove_file(debian.path("etc/systemd/system/check.service")).unwrap();
}

/// The list of what a program is made of, against the format's schema.
#[test]
fn the_bill_of_materials_is_valid() {
    let Some(mut validator) = python("cyclonedx") else { return };
    let mut make = Command::new(root().join("scripts/dependencies"));
    let bom = said(make.args(["bom", "vdkit-cli"]).env("CARGO", env!("CARGO")));
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("bom.json");
    std::fs::write(&file, &bom).unwrap();
    validate(&mut validator, &file);
    let bom: serde_json::Value = serde_json::from_str(&bom).unwrap();
    let components = bom["components"].as_array().unwrap();
    let has = |name: &str| components.iter().any(|component| component["name"] == name);
    assert!(has("clap") && has("vdkit-qcow2") && has("rust-std"));
    // Only in tests, and only in builds.
    assert!(!has("proptest") && !has("cbindgen") && !has("syn"));
}

fn validate(validator: &mut Command, file: &Path) {
    let script = "
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
fault = JsonStrictValidator(SchemaVersion.V1_5).validate_str(open(sys.argv[1]).read())
sys.exit(str(fault) if fault else 0)";
    must(validator.args(["-c", script]).arg(file));
}
