//! The sandbox of `vdkit inspect`: each thing that it forbids is tried in a process of its own.

use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};

use vdkit_cli::sandbox;

/// Tells a copy of this test program what to try.
const PROBE: &str = "VDKIT_SANDBOX_PROBE";
/// Exit codes of a probe: the thing was refused with an error, or it worked.
const REFUSED: i32 = 40;
const WORKED: i32 = 41;

fn told(worked: bool) -> ! {
    std::process::exit(if worked { WORKED } else { REFUSED })
}

fn refused_by_landlock<T>(result: std::io::Result<T>) -> ! {
    match result {
        Err(error) => told(error.kind() != std::io::ErrorKind::PermissionDenied),
        Ok(_) => told(true),
    }
}

/// What the copies run; does nothing in an ordinary run.
#[test]
fn probe() {
    let Ok(what) = std::env::var(PROBE) else { return };
    let (layer, what) = what.split_once(':').unwrap();
    match layer {
        "none" => {}
        "seccomp" => sandbox::seccomp().unwrap(),
        "landlock" => assert!(sandbox::landlock() > 0),
        "limits" => sandbox::limit(64 << 20, 1).unwrap(),
        "all" => {
            let sandbox = sandbox::enter(64 << 20, 5);
            assert!(sandbox.complete && sandbox.landlock_abi > 0, "{sandbox:?}");
        }
        other => panic!("{other}"),
    }
    match what {
        "nothing" => told(true),
        "compute" => {
            // As an inspection does: memory, a thread, the clock, output.
            let sum = std::thread::spawn(|| vec![1u8; 8 << 20].iter().map(|&b| u64::from(b)).sum())
                .join();
            let sum: u64 = sum.unwrap();
            let _ = std::time::Instant::now().elapsed();
            eprintln!("{sum}");
            told(sum == 8 << 20)
        }
        "open" => refused_by_landlock(std::fs::File::open("/etc/passwd")),
        "create" => refused_by_landlock(std::fs::write("/tmp/vdkit-sandbox-probe", b"x")),
        "list" => refused_by_landlock(std::fs::read_dir("/")),
        "connect" => refused_by_landlock(std::net::TcpStream::connect("127.0.0.1:9")),
        "socket" => told(std::net::UdpSocket::bind("127.0.0.1:0").is_ok()),
        "fork" => told(Command::new("/bin/true").spawn().is_ok()),
        "exec" => {
            let _ = Command::new("/bin/true").exec();
            told(false)
        }
        "kill" => {
            let parent = rustix::process::getppid().unwrap();
            told(rustix::process::test_kill_process(parent).is_ok())
        }
        "memory" => {
            let mut bytes: Vec<u8> = Vec::new();
            told(bytes.try_reserve_exact(256 << 20).is_ok())
        }
        "files" => told(std::io::stdin().as_fd().try_clone_to_owned().is_ok()),
        "time" => loop {
            std::hint::black_box(0);
        },
        other => panic!("{other}"),
    }
}

fn try_it(what: &str) -> ExitStatus {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "probe", "--nocapture"])
        .env(PROBE, what)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap()
}

/// Shows that the thing can be done, and is refused within.
fn is_refused_with_an_error(layer: &str, what: &str) {
    let free = try_it(&format!("none:{what}"));
    assert_eq!(free.code(), Some(WORKED), "{what} without a sandbox: {free}");
    let within = try_it(&format!("{layer}:{what}"));
    assert_eq!(within.code(), Some(REFUSED), "{what} within {layer}: {within}");
}

fn ends_the_process(what: &str) {
    for layer in ["seccomp", "all"] {
        let status = try_it(&format!("{layer}:{what}"));
        assert_eq!(status.signal(), Some(31), "{what} within {layer}: {status}");
    }
}

#[test]
fn what_an_inspection_needs_is_allowed() {
    for layer in ["none", "seccomp", "landlock", "limits", "all"] {
        let status = try_it(&format!("{layer}:compute"));
        assert_eq!(status.code(), Some(WORKED), "{layer}: {status}");
    }
}

#[test]
fn no_file_is_opened_made_or_listed() {
    for what in ["open", "list"] {
        is_refused_with_an_error("landlock", what);
        ends_the_process(what);
    }
    let status = try_it("landlock:create");
    assert_eq!(status.code(), Some(REFUSED), "{status}");
    ends_the_process("create");
}

#[test]
fn there_is_no_network() {
    is_refused_with_an_error_or_unreached();
    ends_the_process("socket");
    ends_the_process("connect");
}

/// Landlock knows of TCP from its fourth version on; without it nobody listens on port 9.
fn is_refused_with_an_error_or_unreached() {
    let status = try_it("landlock:connect");
    let old = (1..4).contains(&sandbox_version());
    assert_eq!(status.code(), Some(if old { WORKED } else { REFUSED }), "{status}");
}

/// Landlock's version, asked without restricting this process for good: in a thread of its own.
fn sandbox_version() -> u32 {
    std::thread::spawn(sandbox::landlock).join().unwrap()
}

#[test]
fn there_is_no_other_process() {
    for what in ["fork", "exec", "kill"] {
        ends_the_process(what);
    }
}

#[test]
fn memory_files_and_time_are_bounded() {
    is_refused_with_an_error("limits", "memory");
    is_refused_with_an_error("limits", "files");
    let status = try_it("limits:time");
    assert_eq!(status.signal(), Some(libc::SIGXCPU), "{status}");
}
