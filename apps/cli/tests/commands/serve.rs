//! `vdkit serve` with the clients that people use.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{self, Scratch, peer};
use rustix::process::{Pid, Signal, kill_process};
use vdkit_testkit::Killed;

/// A server in the background, killed at the end.
struct Served {
    child: Killed,
    uri: String,
}

impl Served {
    fn start(scratch: &Scratch, arguments: &[&str]) -> Self {
        let all = [&["serve", "--nbd", "unix:s.sock"], arguments].concat();
        let (child, line) = common::started(scratch.command(&all).stderr(Stdio::piped()));
        let uri = line.trim().rsplit(" at ").next().unwrap().to_owned();
        assert!(uri.starts_with("nbd+unix:///"), "{line}");
        Self { child, uri }
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).unwrap();
    }

    /// Waits for a line on stderr, which must begin so.
    fn says(&mut self, words: &str) {
        let line = common::next_line(self.child.stderr.as_mut().unwrap());
        assert!(line.starts_with(words), "{line}");
    }

    /// Ends it as a user does, and asks for success and silence.
    fn end(mut self) {
        self.signal(Signal::TERM);
        let status = self.child.wait().unwrap();
        let mut errors = String::new();
        std::io::Read::read_to_string(self.child.stderr.as_mut().unwrap(), &mut errors).unwrap();
        assert_eq!(status.code(), Some(0), "{errors}");
        assert_eq!(errors, "");
    }
}

fn output(dir: &Path, program: &str, arguments: &[&str]) -> String {
    String::from_utf8(peer(dir, program, arguments).stdout).unwrap()
}

#[test]
fn silent_peers_that_take_all_descriptors_keep_no_client_out() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "1M"]);
    let vdkit = env!("CARGO_BIN_EXE_vdkit");
    let limited = format!("ulimit -n 64; exec {vdkit} serve --nbd unix:s.sock a.qcow2 2>/dev/null");
    let mut command = Command::new("sh");
    let (child, line) =
        common::started(command.args(["-c", &limited]).current_dir(scratch.folder()));
    let uri = line.trim().rsplit(" at ").next().unwrap();
    let began = Instant::now();
    let socket = scratch.folder().join("s.sock");
    let silent: Vec<_> = (0..80).map(|_| UnixStream::connect(&socket).unwrap()).collect();
    scratch.ok(&["read", uri, "0", "512"]);
    // Those that say nothing may stay for 15 seconds.
    assert!(began.elapsed() < Duration::from_secs(12), "{:?}", began.elapsed());
    drop((silent, child));
}

#[test]
fn qemu_io_reads_and_writes_every_way() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "64M"]);
    let served = Served::start(&scratch, &["a.qcow2"]);
    let io = |commands: &[&str]| {
        let mut arguments = vec!["-f", "raw", &served.uri];
        for command in commands {
            arguments.extend(["-c", command]);
        }
        output(&scratch.folder(), "qemu-io", &arguments)
    };
    io(&["write -P 7 4096 64k", "write -f -P 8 1M 1M", "write -z 8k 4k", "write -zu 1M 64k"]);
    io(&["discard 1088k 64k", "flush", "aio_write -P 9 3M 2M", "aio_flush"]);
    let read = io(&[
        "read -P 7 4096 4k",
        "read -P 0 8k 4k",
        "read -P 0 1M 64k",
        "read -P 8 1152k 896k",
        "read -P 9 3M 2M",
    ]);
    assert!(!read.contains("failed"), "{read}");
    served.end();
    scratch.sound("a.qcow2");
    let from_disk = ["-f", "qcow2", "a.qcow2", "-c", "read -P 9 3M 2M", "-c", "read -P 0 8k 4k"];
    let read = output(&scratch.folder(), "qemu-io", &from_disk);
    assert!(!read.contains("failed"), "{read}");
}

#[test]
fn qemu_img_and_nbdcopy_copy_both_ways() {
    let scratch = Scratch::new();
    let dir = scratch.folder();
    let bytes: Vec<u8> =
        (0..(24u32 << 20)).map(|i| if i % 7 == 0 { (i >> 8) as u8 } else { 0 }).collect();
    scratch.write("source.raw", &bytes);
    scratch.ok(&["create", "a.qcow2", "24M"]);
    let served = Served::start(&scratch, &["a.qcow2", "--name", "disk one"]);
    assert!(served.uri.contains("/disk%20one?socket="), "{}", served.uri);
    peer(&dir, "qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", "source.raw", &served.uri]);
    peer(&dir, "qemu-img", &["compare", "-f", "raw", "-F", "raw", "source.raw", &served.uri]);
    peer(&dir, "nbdcopy", &[&served.uri, "out.raw"]);
    assert!(std::fs::read(scratch.path("out.raw")).unwrap() == bytes);
    // The other way, over several connections, in place of what is there.
    let other: Vec<u8> = bytes.iter().map(|byte| byte ^ 0x55).collect();
    scratch.write("other.raw", &other);
    peer(&dir, "nbdcopy", &["--connections=4", "--flush", "other.raw", &served.uri]);
    served.end();
    scratch.sound("a.qcow2");
    peer(&dir, "qemu-img", &["compare", "a.qcow2", "other.raw"]);
}

#[test]
fn nbdinfo_sees_what_is_there() {
    let scratch = Scratch::new();
    let dir = scratch.folder();
    scratch.ok(&["create", "a.qcow2", "64M"]);
    scratch.ok(&["write", "a.qcow2", "--pattern", "0x11", "1M", "64K"]);
    let served = Served::start(&scratch, &["a.qcow2", "--description", "a word", "--poll-us", "0"]);
    let info: serde_json::Value =
        serde_json::from_str(&output(&dir, "nbdinfo", &["--json", &served.uri])).unwrap();
    let export = &info["exports"][0];
    assert_eq!(info["structured"], true);
    assert_eq!(export["export-size"], 64 << 20);
    assert_eq!(export["description"], "a word");
    for can in ["can_multi_conn", "can_fua", "can_trim", "can_zero", "can_fast_zero", "can_df"] {
        assert_eq!(export[can], true, "{can}");
    }
    let map = output(&dir, "nbdinfo", &["--map", &served.uri]);
    let words: Vec<_> = map.split_whitespace().collect();
    assert_eq!(
        words[..12].join(" "),
        "0 1048576 3 hole,zero 1048576 65536 0 data 1114112 65994752 3 hole,zero"
    );
    let list = output(&dir, "nbdinfo", &["--list", &served.uri]);
    assert!(list.contains("export=\"\""), "{list}");
    served.end();
}

/// libnbd's shell: many requests in flight, each command flag, block status by call-back.
#[test]
fn nbdsh_asks_in_every_way() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "64M"]);
    let served = Served::start(&scratch, &["a.qcow2"]);
    let script = "
h.add_meta_context('base:allocation')
h.add_meta_context('qemu:allocation-depth')
h.connect_uri(uri)
assert h.get_size() == 64 << 20
assert h.can_multi_conn() and h.can_fua() and h.can_trim() and h.can_fast_zero() and h.can_df()
assert h.get_structured_replies_negotiated()
h.pwrite(b'x' * 65536, 1 << 20, nbd.CMD_FLAG_FUA)
h.zero(4096, 1 << 20)
h.trim(65536, 2 << 20)
h.cache(65536, 1 << 20)
flying = [h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray([n]) * 4096), (3 << 20) + n * 8192)
          for n in range(64)]
while h.aio_in_flight():
    h.poll(-1)
assert all(h.aio_command_completed(cookie) for cookie in flying)
h.flush()
for n in range(64):
    assert h.pread(4096, (3 << 20) + n * 8192) == bytearray([n]) * 4096, n
pieces = []
def chunk(data, offset, status, error):
    pieces.append((offset, len(data), status))
assert h.pread_structured(65536, 1 << 20, chunk, nbd.CMD_FLAG_DF)[4096:] == b'x' * 61440
assert len(pieces) == 1
found = {}
def extents(context, offset, entries, error):
    found[context] = entries
h.block_status(2 << 20, 0, extents)
assert found['base:allocation'][:2] == [1 << 20, 3], found
assert found['qemu:allocation-depth'][:4] == [1 << 20, 0, 65536, 1], found
try:
    h.pread(512, 64 << 20, 0)
    raise SystemExit('a read past the end')
except nbd.Error:
    pass
h.shutdown()
";
    let script = format!("uri = {:?}\n{script}", served.uri);
    // As nbdsh itself does, but with the Python that the package is for, whatever PATH has.
    output(&scratch.folder(), "/usr/bin/python3", &["-m", "nbd", "-c", &script]);
    served.end();
    scratch.sound("a.qcow2");
}

#[test]
fn a_bitmap_is_served_for_a_backup() {
    let scratch = Scratch::new();
    let dir = scratch.folder();
    scratch.ok(&["create", "a.qcow2", "64M"]);
    scratch.ok(&["bitmap", "add", "a.qcow2", "b0"]);
    scratch.ok(&["write", "a.qcow2", "--pattern", "0x11", "2M", "64K"]);
    scratch.ok(&["bitmap", "disable", "a.qcow2", "b0"]);
    scratch.fails(
        1,
        "no bitmap 'none'",
        &["serve", "a.qcow2", "--nbd", "unix:s", "--bitmap", "none"],
    );
    let served = Served::start(&scratch, &["a.qcow2", "--bitmap", "b0"]);
    let map = output(&dir, "nbdinfo", &["--map=qemu:dirty-bitmap:b0", &served.uri]);
    let words: Vec<_> = map.split_whitespace().collect();
    assert!(words.windows(3).any(|run| run == ["2097152", "65536", "1"]), "{map}");
    served.end();
}

#[test]
fn fio_writes_and_verifies() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "64M", "-o", "cluster_size=8K"]);
    let served = Served::start(&scratch, &["a.qcow2"]);
    let uri = format!("--uri={}", served.uri);
    peer(
        &scratch.folder(),
        "fio",
        &[
            "--name=x",
            "--ioengine=nbd",
            &uri,
            "--rw=randwrite",
            "--bs=4k",
            "--iodepth=32",
            "--size=32M",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--end_fsync=1",
        ],
    );
    served.end();
    scratch.sound("a.qcow2");
}

#[test]
fn read_only_and_snapshots_refuse_writes() {
    let scratch = Scratch::new();
    let dir = scratch.folder();
    scratch.ok(&["create", "a.qcow2", "16M"]);
    scratch.ok(&["write", "a.qcow2", "--pattern", "0x11", "0", "64K"]);
    scratch.ok(&["snapshot", "create", "a.qcow2", "old"]);
    scratch.ok(&["write", "a.qcow2", "--pattern", "0x22", "0", "64K"]);
    for (arguments, pattern) in
        [(vec!["a.qcow2", "--read-only"], "0x22"), (vec!["a.qcow2", "--snapshot", "old"], "0x11")]
    {
        let served = Served::start(&scratch, &arguments);
        let command = format!("read -P {pattern} 0 64k");
        let read = output(&dir, "qemu-io", &["-r", "-f", "raw", &served.uri, "-c", &command]);
        assert!(!read.contains("failed"), "{read}");
        let write = Command::new("qemu-io")
            .args(["-f", "raw", &served.uri, "-c", "write 0 512"])
            .current_dir(&dir)
            .output()
            .unwrap();
        assert!(!write.status.success());
        // A reader does not keep other readers away.
        scratch.ok(&["info", "a.qcow2"]);
        scratch.ok(&["map", "a.qcow2"]);
        served.end();
    }
}

#[test]
fn a_served_image_is_locked() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "16M"]);
    let served = Served::start(&scratch, &["a.qcow2"]);
    scratch.fails(6, "in use by process", &["write", "a.qcow2", "--pattern", "1", "0", "512"]);
    scratch.fails(6, "in use by process", &["serve", "a.qcow2", "--nbd", "unix:t.sock"]);
    scratch.ok(&["create", "b.qcow2", "16M"]);
    scratch.fails(1, "somebody listens", &["serve", "b.qcow2", "--nbd", "unix:s.sock"]);
    served.end();
    assert!(!scratch.path("s.sock").exists());
    scratch.ok(&["write", "a.qcow2", "--pattern", "1", "0", "512"]);
}

#[test]
fn wrong_addresses_are_explained() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "16M"]);
    scratch.fails(2, "nowhere to serve", &["serve", "a.qcow2"]);
    scratch.fails(2, "unix:PATH", &["serve", "a.qcow2", "--nbd", "s.sock"]);
    scratch.fails(2, "port", &["serve", "a.qcow2", "--nbd", "tcp:localhost"]);
    scratch.write("plain", b"");
    scratch.fails(1, "is no socket", &["serve", "a.qcow2", "--nbd", "unix:plain"]);
    assert!(scratch.path("plain").exists());
    scratch.fails(1, "--tls", &["serve", "a.qcow2", "--nbd", "unix:s", "--tls", "."]);
}

#[test]
fn one_client_is_enough_for_once() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "16M"]);
    let socket = scratch.path("s.sock");
    let dir = scratch.folder();
    let client = std::thread::spawn(move || {
        common::wait_until_connected(&socket);
        let uri = format!("nbd+unix:///?socket={}", socket.display());
        peer(&dir, "qemu-io", &["-f", "raw", &uri, "-c", "write -P 5 0 4k"]);
    });
    let serving = scratch.json_of("serve", 0, &["--once", "a.qcow2", "--nbd", "unix:s.sock"]);
    client.join().unwrap();
    assert_eq!(serving["virtual-size"], 16 << 20);
    assert_eq!(serving["read-only"], false);
    scratch.sound("a.qcow2");
}

#[test]
fn a_tcp_port_is_chosen_and_told() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "16M"]);
    let (mut child, line) = scratch.serve(&["a.qcow2", "--nbd", "tcp:127.0.0.1:0"]);
    let uri = line.trim().rsplit(" at ").next().unwrap().to_owned();
    assert!(uri.starts_with("nbd://127.0.0.1:"), "{line}");
    let read = output(&scratch.folder(), "qemu-io", &["-f", "raw", &uri, "-c", "read -P 0 0 1M"]);
    assert!(!read.contains("failed"), "{read}");
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_kill_loses_nothing_that_was_flushed() {
    let scratch = Scratch::new();
    let dir = scratch.folder();
    scratch.ok(&["create", "a.qcow2", "64M"]);
    for round in 1..6u8 {
        let mut served = Served::start(&scratch, &["a.qcow2"]);
        let flushed = format!("write -P {round} {}M 512k", round);
        peer(&dir, "qemu-io", &["-f", "raw", &served.uri, "-c", &flushed, "-c", "flush"]);
        // Under load that nobody flushes.
        let uri = format!("--uri={}", served.uri);
        let mut load = Command::new("fio")
            .args(["--name=x", "--ioengine=nbd", &uri, "--rw=randwrite", "--bs=4k"])
            .args(["--iodepth=16", "--offset=16M", "--size=40M", "--time_based", "--runtime=30"])
            // Threads instead of processes, so that the kill below ends them all.
            .arg("--thread")
            .current_dir(&dir)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Later each round: once the load has made the file larger by so much.
        let blocks = || std::fs::metadata(scratch.path("a.qcow2")).unwrap().blocks();
        let enough = blocks() + 2048 * u64::from(round);
        common::wait_until(|| blocks() >= enough || load.try_wait().unwrap().is_some());
        served.child.kill().unwrap();
        served.child.wait().unwrap();
        let _ = load.kill();
        load.wait().unwrap();
        // Leaks are what a kill may leave.
        let checked = scratch.run(&["check", "a.qcow2"]);
        assert!(matches!(checked.code, Some(0 | 3)), "{checked:?}");
        for before in 1..=round {
            let pattern = format!("read -P {before} {before}M 512k");
            let read = output(&dir, "qemu-io", &["-f", "qcow2", "a.qcow2", "-c", &pattern]);
            assert!(!read.contains("failed"), "round {round}: {read}");
        }
        // The dead server's socket is in nobody's way.
        assert!(scratch.path("s.sock").exists());
    }
}

#[test]
fn a_full_file_system_makes_writes_wait() {
    let scratch = Scratch::new();
    let Some(disk) = vdkit_testkit::fs::mounted("tmpfs", 8 << 20) else { return };
    std::os::unix::fs::symlink(disk.path(), scratch.path("small")).unwrap();
    let dir = scratch.folder();
    scratch.ok(&["create", "small/a.qcow2", "64M"]);
    std::fs::write(disk.path().join("ballast"), vec![1; 5 << 20]).unwrap();
    let mut served = Served::start(&scratch, &["small/a.qcow2"]);
    let mut writer = Command::new("qemu-io")
        .args(["-f", "raw", &served.uri, "-c", "write -P 3 0 6M", "-c", "flush"])
        .current_dir(&dir)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    served.says("warning: writes wait for space");
    assert!(writer.try_wait().unwrap().is_none(), "it should wait for space");
    // Reads go on meanwhile.
    let read = output(&dir, "qemu-io", &["-r", "-f", "raw", &served.uri, "-c", "read -P 0 32M 1M"]);
    assert!(!read.contains("failed"), "{read}");
    std::fs::remove_file(disk.path().join("ballast")).unwrap();
    assert!(writer.wait().unwrap().success());
    let read = output(&dir, "qemu-io", &["-f", "raw", &served.uri, "-c", "read -P 3 0 6M"]);
    assert!(!read.contains("failed"), "{read}");
    served.says("there is space again");
    served.signal(Signal::TERM);
    assert_eq!(served.child.wait().unwrap().code(), Some(0));
    scratch.sound("small/a.qcow2");
    // With `report` the client hears of it.
    std::fs::write(disk.path().join("ballast"), vec![1; 1 << 20]).unwrap();
    let served = Served::start(&scratch, &["small/a.qcow2", "--on-nospace", "report"]);
    let write = Command::new("qemu-io")
        .args(["-f", "raw", &served.uri, "-c", "write -P 4 16M 6M"])
        .current_dir(&dir)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&write.stdout).into_owned()
        + &String::from_utf8_lossy(&write.stderr);
    assert!(said.contains("No space left"), "{said}");
    drop(served);
    drop(disk);
}

/// The answer of a path, over TCP or a Unix socket.
fn curl(dir: &Path, arguments: &[&str]) -> String {
    output(dir, "curl", &[&["-sS", "-i", "--max-time", "120"], arguments].concat())
}

#[test]
fn the_counts_are_told_over_http() {
    let scratch = Scratch::new();
    let dir = scratch.folder();
    scratch.ok(&["create", "a.qcow2", "64M"]);
    let arguments =
        ["serve", "--json", "a.qcow2", "--nbd", "unix:s.sock", "--metrics", "127.0.0.1:0"];
    let (mut child, line) = common::started(&mut scratch.command(&arguments));
    let answer: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert!(common::faults_against_schema("serve", &answer).is_empty(), "{answer}");
    let url = answer["metrics"].as_str().unwrap();
    assert!(url.starts_with("http://127.0.0.1:") && url.ends_with("/metrics"), "{url}");
    peer(&dir, "qemu-io", &["-f", "raw", answer["uris"][0].as_str().unwrap(), "-c", "write 0 1M"]);
    let text = curl(&dir, &[url]);
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    assert!(text.contains("vdkit_bytes_total{export=\"\",op=\"write\"} 1048576\n"), "{text}");
    assert!(text.contains("vdkit_size_bytes{export=\"\"} 67108864\n"), "{text}");
    assert!(text.contains("vdkit_map_bytes{export=\"\"} 8192\n"), "{text}");
    let text = curl(&dir, &[&format!("{url}/no")]);
    assert!(text.starts_with("HTTP/1.1 404 "), "{text}");
    // A client that says nothing keeps neither others nor the end waiting.
    let host = url.strip_prefix("http://").unwrap().strip_suffix("/metrics").unwrap();
    let _silent: Vec<_> = (0..50).map(|_| std::net::TcpStream::connect(host)).collect();
    assert!(curl(&dir, &[url]).contains(" 200 OK"));
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(std::net::TcpStream::connect(host).is_err());
    scratch.sound("a.qcow2");
}

#[test]
fn the_counts_are_told_at_a_unix_socket() {
    let scratch = Scratch::new();
    let dir = scratch.folder();
    scratch.ok(&["create", "a.qcow2", "64M"]);
    let served = Served::start(&scratch, &["a.qcow2", "--metrics", "unix:m.sock"]);
    let text = curl(&dir, &["--unix-socket", "m.sock", "http://vdkit/metrics"]);
    assert!(text.contains("# TYPE vdkit_requests_total counter\n"), "{text}");
    served.end();
    assert!(!scratch.path("m.sock").exists());
    let nbd = ["serve", "a.qcow2", "--nbd", "unix:s.sock", "--metrics"];
    scratch.fails(2, "write HOST:PORT or unix:PATH", &[&nbd[..], &["9100"]].concat());
    // What is there stays, and the image is closed as it should be.
    scratch.write("plain", b"precious");
    scratch.fails(1, "plain", &[&nbd[..], &["unix:plain"]].concat());
    assert_eq!(std::fs::read(scratch.path("plain")).unwrap(), b"precious");
    assert!(!scratch.path("s.sock").exists());
    scratch.sound("a.qcow2");
}

/// A socket that systemd holds is handed to each run of the service anew, so no run may shut it down.
#[test]
fn a_socket_that_was_handed_over_serves_the_next_run_too() {
    use rustix::io::FdFlags;
    use std::os::fd::AsRawFd;
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.raw", "1M"]);
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let unix = std::os::unix::net::UnixListener::bind(scratch.path("held.sock")).unwrap();
    for run in 0..3 {
        // As systemd does it: the sockets are descriptors 3 and 4 of the process.
        let script = format!(
            "exec 200<&{} 201<&{}; exec 3<&200 4<&201 200<&- 201<&-; LISTEN_FDS=2 LISTEN_PID=$$ exec {} serve -f raw a.raw",
            tcp.as_raw_fd(),
            unix.as_raw_fd(),
            env!("CARGO_BIN_EXE_vdkit")
        );
        let inherited = |flags| {
            rustix::io::fcntl_setfd(&tcp, flags).unwrap();
            rustix::io::fcntl_setfd(&unix, flags).unwrap();
        };
        inherited(FdFlags::empty());
        let mut command = Command::new("bash");
        command.args(["-c", &script]).current_dir(scratch.path(""));
        let spawned = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        inherited(FdFlags::CLOEXEC);
        let mut served = Served { child: Killed(spawned), uri: String::new() };
        let mut lines = BufReader::new(served.child.stdout.as_mut().unwrap());
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        assert!(line.contains("nbd://127.0.0.1:"), "run {run}: {line}");
        // Each of them greets whoever comes.
        let greets = |mut client: Box<dyn std::io::Read>| {
            let mut greeting = [0; 8];
            client.read_exact(&mut greeting).unwrap_or_else(|error| panic!("run {run}: {error}"));
            assert_eq!(greeting, *b"NBDMAGIC", "run {run}");
        };
        let patience = Some(Duration::from_secs(120));
        let client = std::net::TcpStream::connect(tcp.local_addr().unwrap()).unwrap();
        client.set_read_timeout(patience).unwrap();
        greets(Box::new(client));
        let client = UnixStream::connect(scratch.path("held.sock")).unwrap();
        client.set_read_timeout(patience).unwrap();
        greets(Box::new(client));
        served.end();
    }
    // Nor may it take the name away.
    assert!(scratch.path("held.sock").exists());
}

/// A service manager is told when clients can connect, and of the end.
#[test]
fn a_service_manager_is_told() {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "1M"]);
    let path = scratch.path("notify.sock");
    let unique = format!("vdkit-notify-{}", std::process::id());
    let abstract_name = SocketAddr::from_abstract_name(&unique).unwrap();
    let sockets = [
        (path.display().to_string(), UnixDatagram::bind(&path).unwrap()),
        (format!("@{unique}"), UnixDatagram::bind_addr(&abstract_name).unwrap()),
    ];
    for (place, socket) in sockets {
        socket.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let mut command = scratch.command(&["serve", "a.qcow2", "--nbd", "unix:s.sock"]);
        command.env("NOTIFY_SOCKET", &place).stdout(Stdio::null()).stderr(Stdio::piped());
        let spawned = command.spawn().unwrap();
        let served = Served { child: Killed(spawned), uri: String::new() };
        let told = || {
            let mut bytes = [0; 256];
            let length = socket.recv(&mut bytes).unwrap();
            String::from_utf8(bytes[..length].to_vec()).unwrap()
        };
        assert_eq!(told(), "READY=1\nSTATUS=serving a.qcow2");
        // Not earlier than it is so.
        let mut client = UnixStream::connect(scratch.path("s.sock")).unwrap();
        let mut greeting = [0; 8];
        std::io::Read::read_exact(&mut client, &mut greeting).unwrap();
        served.end();
        assert!(told().starts_with("STOPPING=1\n"));
    }
    // An image that cannot be served is never announced, and a manager that is gone stops nothing.
    let socket = UnixDatagram::bind(scratch.path("other.sock")).unwrap();
    socket.set_nonblocking(true).unwrap();
    let mut command = scratch.command(&["serve", "missing.qcow2", "--nbd", "unix:s.sock"]);
    let ended = command.env("NOTIFY_SOCKET", scratch.path("other.sock")).output().unwrap();
    assert_eq!(ended.status.code(), Some(1));
    assert!(socket.recv(&mut [0; 8]).is_err());
    let mut command = scratch.command(&["serve", "a.qcow2", "--nbd", "unix:s.sock"]);
    command.env("NOTIFY_SOCKET", scratch.path("gone.sock"));
    let spawned = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut served = Served { child: Killed(spawned), uri: String::new() };
    served.says("warning: NOTIFY_SOCKET ");
    UnixStream::connect(scratch.path("s.sock")).unwrap();
}
