//! `vdkit ctl` beside a running service.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::common::{self, Scratch, nbd_io, peer};
use vdkit_testkit::Killed;

const URI: &str = "nbd+unix:///?socket=s.sock";

fn serve(scratch: &Scratch, image: &str) -> Killed {
    serve_with(scratch, image, &[])
}

fn serve_with(scratch: &Scratch, image: &str, more: &[&str]) -> Killed {
    let arguments = [image, "--nbd", "unix:s.sock", "--control", "c.sock"];
    scratch.serve(&[&arguments[..], more].concat()).0
}

fn io(scratch: &Scratch, commands: &[&str]) -> String {
    nbd_io(scratch, URI, commands)
}

#[test]
fn a_service_tells_and_obeys() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "64M"]);
    let mut child = serve(&scratch, "a.qcow2");
    io(&scratch, &["write -P 1 0 1M", "read 0 64k", "flush"]);

    let status = scratch.json_of("ctl", 0, &["c.sock", "status"]);
    assert_eq!(status["virtual-size"], 64 << 20);
    assert_eq!(status["parked"]["requests"], 0);
    let stats = scratch.json_of("ctl", 0, &["c.sock", "stats"]);
    assert_eq!(stats["ops"][1]["kind"], "write");
    assert_eq!(stats["ops"][1]["bytes"], 1 << 20);
    assert!(stats["ops"][4]["ops"].as_u64().unwrap() >= 1);
    let text = scratch.ok(&["ctl", "c.sock", "status"]).stdout;
    assert!(text.contains("virtual size: 67108864\n"), "{text}");
    let text = scratch.ok(&["ctl", "c.sock", "stats"]).stdout;
    assert!(text.contains("write bytes: 1048576\n"), "{text}");

    let metrics = scratch.ok(&["ctl", "c.sock", "metrics"]).stdout;
    assert!(metrics.contains("vdkit_bytes_total{export=\"\",op=\"write\"} 1048576\n"), "{metrics}");
    assert!(metrics.contains("# TYPE vdkit_request_seconds histogram\n"), "{metrics}");
    for line in metrics.lines().filter(|line| !line.starts_with('#')) {
        let (_, value) = line.rsplit_once(' ').unwrap();
        assert!(value.parse::<f64>().is_ok(), "{line}");
    }

    // A snapshot between two writes holds the first.
    scratch.json_of("ctl", 0, &["c.sock", "snapshot", "one"]);
    io(&scratch, &["write -P 2 0 1M"]);
    scratch.json_of("ctl", 0, &["c.sock", "snapshot", "two"]);
    scratch.ok(&["ctl", "c.sock", "snapshot-delete", "two"]);
    scratch.fails(1, "two", &["ctl", "c.sock", "snapshot-delete", "two"]);

    scratch.json_of("ctl", 0, &["c.sock", "resize", "96M"]);
    let read = io(&scratch, &["read -P 0 64M 32M", "write -P 3 95M 1M"]);
    assert!(!read.contains("failed"), "{read}");
    scratch.fails(1, "is not shrunk", &["ctl", "c.sock", "resize", "32M"]);

    scratch.json_of("ctl", 0, &["c.sock", "flush"]);
    scratch.ok(&["ctl", "c.sock", "quit"]);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(!scratch.path("c.sock").exists() && !scratch.path("s.sock").exists());
    scratch.ok(&["check", "a.qcow2"]);
    let old = scratch.ok(&["read", "a.qcow2", "--snapshot", "one", "0", "1"]).bytes;
    assert_eq!(old, [1]);
    assert_eq!(scratch.ok(&["read", "a.qcow2", "99614720", "1"]).bytes, [3]);
}

#[test]
fn a_commit_that_gets_no_thread_says_so() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "base.qcow2", "1M"]);
    scratch.ok(&["create", "a.qcow2", "--backing", "base.qcow2"]);
    let mut child = serve(&scratch, "a.qcow2");
    let mut commit = scratch.command(&["ctl", "c.sock", "commit"]);
    // A stack that is larger than an address space.
    let output = commit.env("RUST_MIN_STACK", (1u64 << 48).to_string()).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.starts_with("error: cannot start a thread: "), "{stderr}");
    scratch.ok(&["ctl", "c.sock", "commit"]);
    scratch.ok(&["ctl", "c.sock", "quit"]);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn the_cache_of_the_map_is_counted_and_bounded() {
    let scratch = Scratch::new();
    // 4 MiB of L2 tables, a slice of 4 KiB for each 2 MiB of the disk.
    scratch.ok(&["create", "a.qcow2", "2G", "-o", "cluster_size=4K,preallocation=metadata"]);
    let reads: Vec<String> = (0..1024).map(|i| format!("read -q {}M 4k", 2 * i)).collect();
    let reads: Vec<&str> = reads.iter().map(String::as_str).collect();
    for (size, covers) in [(None, true), (Some("4M"), false), (Some("512K"), false)] {
        let more = size.map_or(vec![], |size| vec!["--l2-cache", size]);
        let mut child = serve_with(&scratch, "a.qcow2", &more);
        let cache = || {
            let stats = scratch.json_of("ctl", 0, &["c.sock", "stats"]);
            let cache = &stats["map-cache"];
            let number = |key: &str| cache[key].as_u64().unwrap();
            assert_eq!(number("map-bytes"), 4 << 20);
            assert!(number("used-bytes") <= number("capacity-bytes"), "{cache}");
            (number("hits"), number("misses"), number("capacity-bytes"))
        };
        let (_, before, capacity) = cache();
        io(&scratch, &reads);
        let (hits, cold, _) = cache();
        assert!(cold - before >= 1024, "{size:?}: {hits} {cold}");
        io(&scratch, &reads);
        let (warm_hits, warm, _) = cache();
        if covers {
            assert!(warm_hits >= hits + 1024, "{warm_hits} {hits}");
            assert_eq!((warm, capacity), (cold, 32 << 20));
        } else if size == Some("512K") {
            // Read round and round, what is dropped is always what comes next.
            assert!(warm - cold > 900 && capacity == 512 << 10, "{cold} {warm} {capacity}");
        }
        let metrics = scratch.ok(&["ctl", "c.sock", "metrics"]).stdout;
        let line = format!("vdkit_map_cache_lookups_total{{export=\"\",found=\"read\"}} {warm}\n");
        assert!(metrics.contains(&line), "{metrics}");
        let text = scratch.ok(&["ctl", "c.sock", "stats"]).stdout;
        assert!(text.contains(&format!("map cache misses: {warm}\n")), "{text}");
        assert!(!text.contains("nanoseconds: ["), "{text}");
        scratch.ok(&["ctl", "c.sock", "quit"]);
        assert_eq!(child.wait().unwrap().code(), Some(0));
    }
}

#[test]
fn a_pause_keeps_requests_waiting() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "64M"]);
    let mut child = serve(&scratch, "a.qcow2");
    scratch.ok(&["ctl", "c.sock", "pause"]);
    assert_eq!(scratch.json_of("ctl", 0, &["c.sock", "status"])["paused"], true);
    std::thread::scope(|scope| {
        let began = Instant::now();
        let scratch = &scratch;
        let writer = scope.spawn(move || {
            io(scratch, &["write -P 1 0 4k", "read -P 1 0 4k"]);
            began.elapsed()
        });
        std::thread::sleep(Duration::from_millis(400));
        assert!(!writer.is_finished());
        scratch.ok(&["ctl", "c.sock", "resume"]);
        assert!(writer.join().unwrap() >= Duration::from_millis(400));
    });
    // The end does not wait for somebody to resume.
    scratch.ok(&["ctl", "c.sock", "pause"]);
    scratch.ok(&["ctl", "c.sock", "quit"]);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    scratch.ok(&["check", "a.qcow2"]);
}

#[test]
fn a_socket_takes_no_file_away() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "64M"]);
    std::fs::write(scratch.path("plain"), b"precious").unwrap();
    let nbd = ["serve", "a.qcow2", "--nbd", "unix:s.sock"];
    scratch.fails(1, "plain", &[&nbd[..], &["--control", "plain"]].concat());
    scratch.fails(1, "plain", &["serve", "a.qcow2", "--nbd", "unix:plain"]);
    scratch.fails(1, "plain", &["serve", "a.qcow2", "--vhost-user", "plain"]);
    assert_eq!(std::fs::read(scratch.path("plain")).unwrap(), b"precious");
    // What failed so was closed as it should be.
    scratch.ok(&["check", "a.qcow2"]);
    assert!(!scratch.path("s.sock").exists());

    let mut child = serve(&scratch, "a.qcow2");
    let mode = std::fs::metadata(scratch.path("c.sock")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    // Nor does it take the place of one that somebody listens at.
    scratch.ok(&["create", "b.qcow2", "64M"]);
    let taken = ["serve", "b.qcow2", "--nbd", "unix:t.sock", "--control", "c.sock"];
    scratch.fails(1, "c.sock", &taken);
    scratch.ok(&["ctl", "c.sock", "quit"]);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn nonsense_is_refused() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "64M"]);
    scratch.fails(1, "no service answers", &["ctl", "none.sock", "status"]);
    scratch.fails(2, "needs a NAME", &["ctl", "none.sock", "snapshot"]);
    scratch.fails(2, "needs a SIZE", &["ctl", "none.sock", "resize"]);
    scratch.fails(2, "no VALUE", &["ctl", "none.sock", "flush", "x"]);
    let mut child = serve(&scratch, "a.qcow2");
    for (line, words) in [
        (&b"nonsense\n"[..], "not a command"),
        (b"{\"command\":\"dance\"}\n", "not a command"),
        (b"{\"command\":\"resize\",\"size\":1,\"force\":true}\n", "not a command"),
        (b"{\"command\":\"resize\",\"size\":18446744073709551615}\n", "error"),
    ] {
        let mut socket = UnixStream::connect(scratch.path("c.sock")).unwrap();
        socket.write_all(line).unwrap();
        let mut answer = String::new();
        BufReader::new(&socket).read_line(&mut answer).unwrap();
        assert!(answer.contains("\"ok\":false") && answer.contains(words), "{answer}");
    }
    // A line without an end.
    let mut socket = UnixStream::connect(scratch.path("c.sock")).unwrap();
    let _ = socket.write_all(&vec![b'x'; 1 << 20]);
    let mut answer = Vec::new();
    let _ = socket.read_to_end(&mut answer);
    scratch.ok(&["ctl", "c.sock", "quit"]);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

/// The runs that an NBD client finds dirty in a bitmap, as (offset, length).
fn dirty_runs(scratch: &Scratch, bitmap: &str) -> Vec<(u64, u64)> {
    let dir = scratch.folder();
    let map = format!("--map=qemu:dirty-bitmap:{bitmap}");
    let answer = peer(&dir, "nbdinfo", &["--json", &map, URI]).stdout;
    let answer: serde_json::Value = serde_json::from_slice(&answer).unwrap();
    let number = |run: &serde_json::Value, key: &str| run[key].as_u64().unwrap();
    let runs = answer.as_array().unwrap().iter().filter(|run| number(run, "type") == 1);
    runs.map(|run| (number(run, "offset"), number(run, "length"))).collect()
}

#[test]
fn bitmaps_are_changed_while_the_disk_is_served() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "64M"]);
    scratch.ok(&["bitmap", "add", "a.qcow2", "old"]);
    let mut child = serve(&scratch, "a.qcow2");
    let ctl = |arguments: &[&str]| {
        let all = [&["c.sock"], arguments].concat();
        scratch.json_of("ctl", 0, &all)
    };
    // A client that is there all the time: its writes before and after the bitmap was added.
    io(&scratch, &["write -P 1 0 64k", "flush"]);
    let list = ctl(&["bitmap-add", "new", "-g", "4K"]);
    assert_eq!(list["bitmaps"][1]["name"], "new");
    assert_eq!(list["bitmaps"][1]["granularity"], 4096);
    assert_eq!(list["bitmaps"][1]["dirty-bytes"], 0);
    assert_eq!(list["bitmaps"][0]["dirty-bytes"], 65536);
    ctl(&["bitmap-add", "later", "--disabled"]);
    io(&scratch, &["write -P 2 1M 4k", "discard 2M 64k", "flush"]);
    assert_eq!(dirty_runs(&scratch, "new"), [(1 << 20, 4096), (2 << 20, 65536)]);
    assert_eq!(dirty_runs(&scratch, "later"), []);
    // What was neither named when the service began nor added since is nobody's.
    let dir = scratch.folder();
    let shown = peer(&dir, "nbdinfo", &["--json", "--list", URI]).stdout;
    let shown = String::from_utf8(shown).unwrap();
    assert!(shown.contains("qemu:dirty-bitmap:new") && !shown.contains(":old"), "{shown}");

    ctl(&["bitmap-enable", "later"]);
    ctl(&["bitmap-disable", "new"]);
    io(&scratch, &["write -P 3 3M 64k", "flush"]);
    assert_eq!(dirty_runs(&scratch, "later"), [(3 << 20, 65536)]);
    assert_eq!(dirty_runs(&scratch, "new"), [(1 << 20, 4096), (2 << 20, 65536)]);
    let list = ctl(&["bitmap-merge", "later", "new"]);
    assert_eq!(list["bitmaps"][1]["dirty-bytes"], 4096 + 2 * 65536);
    let list = ctl(&["bitmap-merge", "new", "--into", "later"]);
    assert_eq!(list["bitmaps"][2]["dirty-bytes"], 3 * 65536);
    assert_eq!(ctl(&["bitmap-clear", "later"])["bitmaps"][2]["dirty-bytes"], 0);
    ctl(&["bitmap-remove", "new"]);
    let shown = peer(&dir, "nbdinfo", &["--json", "--list", URI]).stdout;
    assert!(!String::from_utf8(shown).unwrap().contains("dirty-bitmap:new"));
    let text = scratch.ok(&["ctl", "c.sock", "bitmap-list"]).stdout;
    assert!(text.contains("later enabled: true\n"), "{text}");

    scratch.fails(1, "no bitmap", &["ctl", "c.sock", "bitmap-clear", "new"]);
    scratch.fails(1, "already", &["ctl", "c.sock", "bitmap-add", "old"]);
    scratch.fails(2, "needs a INTO", &["ctl", "c.sock", "bitmap-merge", "old"]);
    scratch.fails(2, "for bitmap-add", &["ctl", "c.sock", "bitmap-clear", "old", "-g", "4K"]);
    scratch.fails(
        2,
        "takes SRC alone",
        &["ctl", "c.sock", "bitmap-merge", "a", "b", "--into", "c"],
    );
    scratch.fails(2, "for bitmap-merge", &["ctl", "c.sock", "bitmap-clear", "--into", "old"]);

    // Killed: what was flushed is marked, and QEMU believes it.
    io(&scratch, &["write -P 4 4M 64k", "flush"]);
    child.kill().unwrap();
    child.wait().unwrap();
    let kept = scratch.json_of("bitmap", 0, &["list", "a.qcow2"]);
    let names: Vec<_> = kept["bitmaps"].as_array().unwrap().iter().map(|b| &b["name"]).collect();
    assert_eq!(names, ["old", "later"]);
    assert_eq!(kept["bitmaps"][1]["dirty-bytes"], 65536);
    peer(&dir, "qemu-img", &["bitmap", "--clear", "a.qcow2", "later"]);
}

#[test]
fn bitmaps_need_an_image_that_has_them_and_may_be_written() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "-f", "raw", "a.raw", "1M"]);
    scratch.ok(&["create", "a.qcow2", "64M"]);
    scratch.ok(&["bitmap", "add", "a.qcow2", "b0"]);
    for (image, words) in [("a.raw", "in a raw image"), ("a.qcow2", "read")] {
        let more: &[&str] = if image == "a.raw" { &["-f", "raw"] } else { &["--read-only"] };
        let mut child = serve_with(&scratch, image, more);
        scratch.fails(1, words, &["ctl", "c.sock", "bitmap-add", "b1"]);
        if image == "a.qcow2" {
            let list = scratch.json_of("ctl", 0, &["c.sock", "bitmap-list"]);
            assert_eq!(list["bitmaps"][0]["name"], "b0");
        }
        scratch.ok(&["ctl", "c.sock", "quit"]);
        assert_eq!(child.wait().unwrap().code(), Some(0));
    }
}

/// Who waits to be accepted still waits when that fails, so the server must not try again at once.
#[test]
fn a_control_socket_without_a_free_descriptor_does_not_spin() {
    if !vdkit_testkit::require_peer("strace") {
        return;
    }
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "1M"]);
    let mut command = std::process::Command::new("strace");
    command.args(["-f", "-ttt", "-e", "trace=accept4", "-e"]);
    command.args(["inject=accept4:error=EMFILE:when=1..6", "-o", "log"]);
    command.args([env!("CARGO_BIN_EXE_vdkit"), "serve", "a.qcow2"]);
    command.args(["--nbd", "unix:s.sock", "--control", "c.sock"]).current_dir(scratch.path(""));
    let (mut child, line) = common::started(command.stderr(Stdio::null()));
    assert!(line.starts_with("serving"), "{line}");
    // It is answered once there are descriptors again.
    scratch.ok(&["ctl", "c.sock", "status"]);
    scratch.ok(&["ctl", "c.sock", "quit"]);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let log = std::fs::read_to_string(scratch.path("log")).unwrap();
    let failed: Vec<f64> = log
        .lines()
        .filter(|line| line.contains("EMFILE"))
        .map(|line| line.split_whitespace().nth(1).unwrap().parse().unwrap())
        .collect();
    assert_eq!(failed.len(), 6, "{log}");
    // However slow the machine is, a pause is never shorter than it was asked to be.
    assert!(failed.windows(2).all(|pair| pair[1] - pair[0] > 0.04), "{log}");
}
