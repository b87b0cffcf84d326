//! The programs of `examples/`, run one after the other on the same images.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

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
