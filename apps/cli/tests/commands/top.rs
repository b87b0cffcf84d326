//! `vdkit top` beside a service under load, in a pipe and on a terminal.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{self, Scratch, peer};
use rustix::pty::OpenptFlags;
use rustix::termios::{Winsize, tcgetattr, tcsetwinsize};
use vdkit_testkit::Killed;

const URI: &str = "nbd+unix:///?socket=s.sock";
/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(120);

fn serve(scratch: &Scratch, more: &[&str]) -> Killed {
    scratch.ok(&["create", "a.qcow2", "64M", "-o", "preallocation=metadata"]);
    let arguments = ["a.qcow2", "--nbd", "unix:s.sock", "--control", "c.sock"];
    scratch.serve(&[&arguments[..], more].concat()).0
}

/// Reads for so long as it lives.
fn load(scratch: &Scratch) -> Killed {
    let fio = Command::new("fio")
        .args(["--name=load", "--ioengine=nbd", "--rw=randrw", "--bs=4k", "--iodepth=4"])
        .args(["--size=64M", "--time_based", "--runtime=600", &format!("--uri={URI}")])
        .current_dir(scratch.path(""))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("fio is needed");
    let load = Killed(fio);
    common::wait_until(|| {
        let stats = scratch.json_of("ctl", 0, &["c.sock", "stats"]);
        stats["ops"][0]["ops"].as_u64().unwrap() > 100
    });
    load
}

#[test]
fn a_service_under_load_is_measured() {
    let scratch = Scratch::new();
    let _service = serve(&scratch, &[]);
    let load = load(&scratch);
    let number = |value: &serde_json::Value| value.as_f64().unwrap();
    // On a busy machine the load may stand still for as long as one interval.
    let measured = (0..100).find_map(|_| {
        let one = scratch.json_of("top", 0, &["--once", "--interval", "0.5", "c.sock"]);
        let both = [0, 1].map(|kind| number(&one["ops"][kind]["requests-per-second"]));
        both.iter().all(|requests| *requests > 0.0).then_some(one)
    });
    let one = measured.expect("reads and writes in one interval");
    let interval = number(&one["interval-seconds"]);
    assert!((0.4..300.0).contains(&interval), "{one}");
    for kind in [0, 1] {
        let op = &one["ops"][kind];
        let requests = number(&op["requests-per-second"]);
        let bytes = number(&op["bytes-per-second"]);
        assert!((bytes / requests - 4096.0).abs() < 1.0, "{one}");
        let times = ["mean", "p50", "p99"].map(|key| number(&op[format!("{key}-microseconds")]));
        assert!(times.iter().all(|time| *time > 0.0) && times[1] <= times[2], "{one}");
    }
    assert!((0.0..=1.0).contains(&number(&one["fast-lane-share"])), "{one}");
    // A small map is wholly cached, so next to nothing is read.
    assert!(number(&one["map-cache"]["hit-share"]) > 0.9, "{one}");
    assert_eq!(one["map-cache"]["map-bytes"], 8192);

    let text = scratch.ok(&["top", "--interval", "0.1", "--count", "3", "c.sock"]).stdout;
    assert_eq!(text.matches("requests/s").count(), 3, "{text}");
    assert!(text.starts_with("a.qcow2  64 MiB  up 0:00:"), "{text}");
    assert!(!text.contains('\x1b'), "{text}");

    // Without load nothing happens, and who waits is shown.
    drop(load);
    scratch.ok(&["ctl", "c.sock", "pause"]);
    let lines = scratch.run(&["top", "--json", "--interval", "0.2", "--count", "2", "c.sock"]);
    let last: serde_json::Value =
        serde_json::from_str(lines.stdout.lines().last().unwrap()).unwrap();
    assert_eq!(lines.stdout.lines().count(), 2);
    assert_eq!(
        (&last["paused"], number(&last["ops"][0]["requests-per-second"])),
        (&true.into(), 0.0)
    );
    let text = scratch.ok(&["top", "--once", "--interval", "0.1", "c.sock"]).stdout;
    assert!(text.contains("PAUSED"), "{text}");
}

#[test]
fn it_ends_with_the_service() {
    let scratch = Scratch::new();
    let mut service = serve(&scratch, &["--read-only"]);
    let mut command = scratch.command(&["top", "--interval", "0.1", "c.sock"]);
    let mut top = Killed(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(top.0.stdout.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    assert!(line.starts_with("a.qcow2  64 MiB  read-only  up "), "{line}");
    scratch.ok(&["ctl", "c.sock", "quit"]);
    assert_eq!(service.0.wait().unwrap().code(), Some(0));
    let mut rest = String::new();
    lines.read_to_string(&mut rest).unwrap();
    let mut said = String::new();
    top.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!((top.0.wait().unwrap().code(), said.as_str()), (Some(0), "the service has ended\n"));
    scratch.fails(1, "no service answers", &["top", "--once", "c.sock"]);
}

#[test]
fn it_ends_well_though_nobody_hears_it() {
    let scratch = Scratch::new();
    let mut service = serve(&scratch, &["--read-only"]);
    let mut command = scratch.command(&["top", "--interval", "0.1", "c.sock"]);
    let mut top = Killed(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    drop(top.0.stderr.take());
    let mut lines = BufReader::new(top.0.stdout.take().unwrap());
    lines.read_line(&mut String::new()).unwrap();
    scratch.ok(&["ctl", "c.sock", "quit"]);
    assert_eq!(service.0.wait().unwrap().code(), Some(0));
    lines.read_to_string(&mut String::new()).unwrap();
    assert_eq!(top.0.wait().unwrap().code(), Some(0));
}

#[test]
fn an_interrupt_before_the_last_interval_is_no_success() {
    let scratch = Scratch::new();
    let _service = serve(&scratch, &["--read-only"]);
    let arguments = ["top", "--count", "1000", "--interval", "0.1", "c.sock"];
    let (mut top, line) = common::started(&mut scratch.command(&arguments));
    assert!(line.starts_with("a.qcow2"), "{line}");
    common::signal(top.id(), "INT");
    assert_eq!(top.wait().unwrap().code(), Some(130));
}

#[test]
fn nonsense_is_refused() {
    let scratch = Scratch::new();
    scratch.fails(1, "none.sock: no service answers", &["top", "none.sock"]);
    for interval in ["0", "-1", "x", "1e9", "nan"] {
        let interval = format!("--interval={interval}");
        scratch.fails(2, "is not a number of seconds from", &["top", &interval, "none.sock"]);
    }
    scratch.fails(2, "--count", &["top", "--count", "0", "none.sock"]);
    scratch.fails(2, "--once", &["top", "--count", "2", "--once", "none.sock"]);
    // Something that listens and is no service.
    let other = std::os::unix::net::UnixListener::bind(scratch.path("other.sock")).unwrap();
    let answers = std::thread::spawn(move || {
        let (mut client, _) = other.accept().unwrap();
        client.write_all(b"{\"ok\":true,\"answer\":{\"filename\":7}}\n").unwrap();
    });
    scratch.fails(1, "no service answers", &["top", "--once", "other.sock"]);
    answers.join().unwrap();
}

/// A terminal of 24 lines, and what was written to it.
struct Terminal {
    master: File,
    slave: File,
    seen: String,
}

impl Terminal {
    fn new(columns: u16) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = rustix::pty::openpt(flags).unwrap();
        rustix::pty::grantpt(&master).unwrap();
        rustix::pty::unlockpt(&master).unwrap();
        let name = rustix::pty::ptsname(&master, Vec::new()).unwrap();
        let slave = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
        let this = Self { master: master.into(), slave, seen: String::new() };
        this.resize(columns);
        this
    }

    fn resize(&self, columns: u16) {
        let size = Winsize { ws_row: 24, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.slave, size).unwrap();
    }

    fn start(&self, scratch: &Scratch, arguments: &[&str]) -> Killed {
        let end = || Stdio::from(self.slave.try_clone().unwrap());
        let mut command = scratch.command(arguments);
        command.stdin(end()).stdout(end()).stderr(end()).env("TERM", "xterm");
        Killed(command.spawn().unwrap())
    }

    /// Reads until a text was written.
    fn wait_for(&mut self, text: &str) {
        let began = Instant::now();
        while !self.seen.contains(text) {
            assert!(began.elapsed() < PATIENCE, "no '{text}' in {:?}", self.seen);
            let mut piece = [0; 4096];
            let n = self.master.read(&mut piece).unwrap();
            self.seen.push_str(&String::from_utf8_lossy(&piece[..n]));
        }
    }

    fn modes(&self) -> String {
        format!("{:?}", tcgetattr(&self.slave).unwrap())
    }
}

#[test]
fn the_live_view_takes_the_terminal_and_gives_it_back() {
    let scratch = Scratch::new();
    let _service = serve(&scratch, &[]);
    let io = ["-f", "raw", URI, "-c", "write -P 1 0 1M", "-c", "read 0 64k"];
    peer(&scratch.path(""), "qemu-io", &io);
    for keys in ["q", "\x1b", "\x03"] {
        let mut terminal = Terminal::new(80);
        let before = terminal.modes();
        let mut top = terminal.start(&scratch, &["top", "--interval", "0.1", "c.sock"]);
        terminal.wait_for("\x1b[?1049h");
        terminal.wait_for("a.qcow2  64 MiB");
        terminal.wait_for("requests/s");
        terminal.wait_for("q: quit");
        assert_ne!(terminal.modes(), before);
        terminal.master.write_all(keys.as_bytes()).unwrap();
        terminal.wait_for("\x1b[?1049l");
        assert_eq!(top.0.wait().unwrap().code(), Some(0), "{keys:?}");
        assert_eq!(terminal.modes(), before, "{keys:?}");
        assert!(terminal.seen.contains("\x1b[?25h"), "the cursor is gone");
    }
}

#[test]
fn the_live_view_ends_on_a_signal_and_with_the_service() {
    let scratch = Scratch::new();
    let mut service = serve(&scratch, &[]);
    for by_signal in [true, false] {
        let mut terminal = Terminal::new(20);
        let before = terminal.modes();
        let mut top = terminal.start(&scratch, &["top", "--interval", "0.1", "c.sock"]);
        terminal.wait_for("requests/");
        terminal.resize(100);
        if by_signal {
            common::signal(top.0.id(), "TERM");
        } else {
            scratch.ok(&["ctl", "c.sock", "quit"]);
            terminal.wait_for("the service has ended");
        }
        terminal.wait_for("\x1b[?1049l");
        assert_eq!(top.0.wait().unwrap().code(), Some(0));
        assert_eq!(terminal.modes(), before);
    }
    assert_eq!(service.0.wait().unwrap().code(), Some(0));
    // A service that is not there leaves the terminal alone.
    let mut terminal = Terminal::new(80);
    let mut top = terminal.start(&scratch, &["top", "c.sock"]);
    assert_eq!(top.0.wait().unwrap().code(), Some(1));
    terminal.wait_for("no service answers");
    assert!(!terminal.seen.contains("\x1b[?1049h"));
}
