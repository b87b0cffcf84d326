//! What each cache mode costs and does, in system calls on the image.

use std::process::Command;

use crate::common::{self, Scratch, peer};
use vdkit_testkit::require_peer;

/// System calls on the image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Calls {
    /// Writes of bytes.
    writes: u64,
    syncs: u64,
    /// Opened past the page cache.
    direct: bool,
}

fn format_of(image: &str) -> &str {
    image.split('.').nth(1).unwrap()
}

/// Serves an image under strace while a client does `commands`; counts the calls on the image.
fn serve_and_count(scratch: &Scratch, image: &str, mode: &str, commands: &[String]) -> Calls {
    let calls = "trace=fcntl,pwrite64,pwritev,pwritev2,fdatasync,fsync,io_uring_setup";
    let mut command = Command::new("strace");
    command
        .args(["-f", "-y", "-e", calls, "-o", "log", env!("CARGO_BIN_EXE_vdkit"), "serve", image])
        .args(["-f", format_of(image)])
        .args(["--nbd", "unix:s.sock", "--control", "c.sock", "--cache", mode])
        .current_dir(scratch.path(""));
    let (mut child, line) = common::started(&mut command);
    assert!(line.starts_with("serving"), "{line}");
    let mut arguments = vec!["-t", "writeback", "-f", "raw", "nbd+unix:///?socket=s.sock"];
    arguments.extend(commands.iter().flat_map(|command| ["-c", command]));
    let said = peer(&scratch.path(""), "qemu-io", &arguments);
    assert!(!String::from_utf8_lossy(&said.stdout).contains("failed"), "{said:?}");
    scratch.ok(&["ctl", "c.sock", "quit"]);
    assert_eq!(child.wait().unwrap().code(), Some(0));

    let mut counted = Calls::default();
    let log = std::fs::read_to_string(scratch.path("log")).unwrap();
    assert!(!log.contains("io_uring_setup"), "writes would go uncounted");
    for call in log.lines().filter(|call| call.contains(image) && !call.contains("resumed>")) {
        counted.direct |= call.contains("F_SETFL") && call.contains("O_DIRECT");
        counted.writes += u64::from(call.contains("pwrite"));
        counted.syncs += u64::from(call.contains("sync("));
    }
    counted
}

/// Requests, so many times: 4 KiB at places of their own, where there is space already. The
/// client's own flush at its end comes to each run once.
fn requests(times: u64, each: &[&str]) -> Vec<String> {
    (0..times)
        .flat_map(|i| each.iter().map(move |one| one.replace("AT", &(i * 12288).to_string())))
        .collect()
}

/// What one of many requests costs: the difference of a long and a short run.
fn cost(scratch: &Scratch, image: &str, mode: &str, each: &[&str]) -> (f64, f64) {
    let few = serve_and_count(scratch, image, mode, &requests(2, each));
    let many = serve_and_count(scratch, image, mode, &requests(12, each));
    let direct = matches!(mode, "none" | "directsync");
    assert_eq!((few.direct, many.direct), (direct, direct), "{mode}");
    let of = |many: u64, few: u64| (many as f64 - few as f64) / 10.0;
    (of(many.writes, few.writes), of(many.syncs, few.syncs))
}

#[test]
fn each_mode_costs_what_its_promise_needs() {
    if !require_peer("strace") || !require_peer("qemu-io") {
        return;
    }
    let (plain, fua, flushed) = (["write AT 4k"], ["write -f AT 4k"], ["write AT 4k", "flush"]);
    for image in ["a.raw", "a.qcow2"] {
        let scratch = Scratch::new();
        scratch.write("bytes", &[7; 1 << 20]);
        scratch.ok(&[
            "convert",
            "bytes",
            "-f",
            "raw",
            image,
            "-O",
            image.split('.').nth(1).unwrap(),
        ]);
        let cost = |mode, each: &[&str]| cost(&scratch, image, mode, each);
        for (mode, durable) in
            [("writeback", 0.0), ("none", 0.0), ("writethrough", 1.0), ("directsync", 1.0)]
        {
            // One call a write. In the durable modes a sync follows, which serves all writes that
            // wait for one: here there is one at a time.
            assert_eq!(cost(mode, &plain), (1.0, durable), "{image} {mode}");
            assert_eq!(cost(mode, &fua), (1.0, 1.0), "{image} {mode} FUA");
            assert_eq!(cost(mode, &flushed), (1.0, 1.0 + durable), "{image} {mode} flush");
        }
        for each in [&plain[..], &fua, &flushed] {
            assert_eq!(cost("unsafe", each), (1.0, 0.0), "{image} unsafe");
        }
    }
}
