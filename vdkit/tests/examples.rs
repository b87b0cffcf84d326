//! The programs of `examples/`, run one after the other on the same images.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use vdkit::jobs::{CreateOptions, create};
use vdkit::{Monitor, Options, Secret};

/// What the jobs have beside a job: parts and variants of one, and questions before one.
const NO_JOBS: [&str; 17] = [
    "change_key",
    "commit_disks",
    "convert_stream",
    "default_threads",
    "dependents",
    "describe_disk",
    "describe_packaged",
    "map",
    "measure_empty",
    "merge_bitmap",
    "occupied",
    "receive",
    "refuse_dependents",
    "remove_key",
    "replaced_files",
    "take_over",
    "verify",
];

/// Cargo builds examples beside the tests.
fn program(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let path = tests.parent().and_then(Path::parent).unwrap().join("examples").join(name);
    assert!(
        path.exists(),
        "{} is missing: cargo build --workspace --examples --profile test",
        path.display()
    );
    path
}

/// Runs an example in the folder; its output.
fn run(folder: &Path, line: &str) -> String {
    let mut words = line.split(' ');
    let mut command = Command::new(program(words.next().unwrap()));
    let done = command.args(words).current_dir(folder).output().unwrap();
    let error = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{line}: {error}");
    String::from_utf8(done.stdout).unwrap()
}

#[test]
fn each_example_does_what_its_first_line_says() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path();
    let run = |line| run(folder, line);

    assert_eq!(run("create base.qcow2 qcow2 67108864"), "base.qcow2: 67108864 bytes\n");
    assert_eq!(run("bitmap base.qcow2 changes"), "3145728 +65536\n");
    assert!(run("snapshot base.qcow2 before").ends_with(" before\n"));
    assert!(run("extents base.qcow2").contains("3145728 +65536: data, host offset "));
    assert_eq!(run("queue base.qcow2"), "1023 of 1024 pieces are zero\n");
    assert!(run("measure base.qcow2 vhdx").contains(" bytes; "));

    assert!(run("convert base.qcow2 copy.vmdk vmdk").starts_with("copy.vmdk: 67108864 bytes"));
    assert_eq!(run("compare base.qcow2 copy.vmdk"), "identical\n");

    run("create overlay.qcow2 qcow2 67108864 copy.vmdk vmdk");
    assert_eq!(run("rebase overlay.qcow2"), "4096 bytes copied\n");
    run("create overlay.qcow2.new qcow2 67108864 overlay.qcow2 qcow2");
    assert!(run("commit overlay.qcow2.new").starts_with("into "));
    assert_eq!(run("compare overlay.qcow2 base.qcow2"), "identical\n");
    assert_eq!(run("resize overlay.qcow2 134217728"), "134217728 bytes\n");
    assert!(run("compact overlay.qcow2").contains(" → "));
    assert_eq!(run("check overlay.qcow2 --repair"), "0 errors, 0 leaks\n");
    assert_eq!(run("inspect overlay.qcow2"), "qcow2: Accept\n");
    assert!(run("tree overlay.qcow2.new").contains("overlay.qcow2.new on overlay.qcow2 (Listed)"));
    assert!(run("doctor overlay.qcow2").contains("0 errors, "));
    assert!(run("validate copy.vmdk gcp").ends_with("\nnot accepted\n"));
    assert_eq!(run("amend base.qcow2 lazy_refcounts=on"), "changed: lazy_refcounts\n");
    assert!(run("dd base.qcow2 part.raw raw 3 2").starts_with("2097152 bytes, "));
    assert!(
        run("appliance base.qcow2 guest.ova taken.qcow2 qcow2").ends_with(": manifest verified\n")
    );
    assert_eq!(run("compare base.qcow2 taken.qcow2"), "identical\n");
    encrypted(&folder.join("encrypted.qcow2"));
    assert_eq!(run("keys encrypted.qcow2 first second"), "slot 0\nslot 1: the new passphrase\n");
}

/// Makes an encrypted image, whose passphrase is "first".
fn encrypted(path: &Path) {
    let driver = vdkit::format("qcow2").unwrap();
    let texts = ["encrypt.format=luks", "encrypt.iter-time=10"];
    let mut options = Options::parse("qcow2", driver.options(), texts).unwrap();
    options.set_key(Some(Secret::new(b"first".to_vec())));
    let new = CreateOptions::new(path, driver).guest_bytes(1 << 20).options(options);
    create(&vdkit::registry(), &new, &Monitor::default()).unwrap();
}

#[test]
fn the_server_gives_its_uri_and_ends() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), "create disk.qcow2 qcow2 1048576");
    let socket = folder.path().join("socket");
    let mut server = Command::new(program("serve"))
        .arg(folder.path().join("disk.qcow2"))
        .arg(&socket)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut uri = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut uri).unwrap();
    assert!(uri.starts_with("nbd+unix:///?socket="), "{uri}");
    assert!(socket.exists());
    server.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(server.wait().unwrap().success());
}

#[test]
fn each_job_has_an_example() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let sources: String = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| std::fs::read_to_string(entry.unwrap().path()).unwrap())
        .collect();
    let names = include_str!("public-names.txt").lines();
    let functions = names.filter_map(|name| name.strip_prefix("jobs::"));
    for job in functions.filter(|name| name.starts_with(char::is_lowercase)) {
        let known = job.contains("::") || NO_JOBS.contains(&job);
        assert!(known || sources.contains(&format!("{job}(")), "{job} has no example");
    }
}

/// Every file of `examples/` is run above.
#[test]
fn no_example_is_forgotten() {
    let here = include_str!("examples.rs");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    for entry in std::fs::read_dir(folder).unwrap() {
        let name = entry.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned();
        let called = [format!("run(\"{name} "), format!("program(\"{name}\")")];
        assert!(called.iter().any(|call| here.contains(call)), "{name} is not run");
    }
}
