//! `--fork`: the program starts itself again, and returns when the second process says that clients
//! can connect.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use crate::failure::Failure;
use crate::sockets;

/// Set in the environment of the second process.
const MARK: &str = "VDKIT_QEMU_NBD_READY";
/// The value of [`MARK`] if sockets were handed to the first process.
const WITH_SOCKETS: &str = "sockets";
/// What the second process writes to its stdout when clients can connect.
const READY: &[u8] = b"ready";

/// Whether this is the second process.
pub fn is_second() -> bool {
    std::env::var_os(MARK).is_some()
}

fn again(args: &[OsString]) -> std::io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg0("qemu-nbd").args(args).env(MARK, "1");
    Ok(command)
}

/// Makes sockets that were handed to the first process this second one's, by starting the program
/// again in this process: the environment must name its id, which nobody knew before it began.
///
/// # Errors
/// The program cannot be started.
pub fn take_sockets(args: &[OsString]) -> Result<(), Failure> {
    if std::env::var_os(MARK).is_none_or(|mark| mark != WITH_SOCKETS) {
        return Ok(());
    }
    Err(again(args)?.env(sockets::PROCESS, std::process::id().to_string()).exec().into())
}

/// Starts the second process with the same arguments, and waits until it serves.
///
/// # Errors
/// It cannot be started, or it ended before it served; it has said why on stderr.
pub fn start(args: &[OsString]) -> Result<(), Failure> {
    let mut second = again(args)?;
    if sockets::count() > 0 {
        second.env(MARK, WITH_SOCKETS);
    }
    let mut child = second.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let mut said = Vec::new();
    if let Some(out) = child.stdout.as_mut() {
        out.take(READY.len() as u64).read_to_end(&mut said)?;
    }
    if said == READY {
        return Ok(());
    }
    let code = child.wait()?.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    Err(Failure::new("").code(code.max(1)))
}

/// Reports that clients can connect, if this is a second process, and leaves the terminal.
///
/// # Errors
/// The first process is gone.
pub fn ready() -> Result<(), Failure> {
    if !is_second() {
        return Ok(());
    }
    // Scripts end it by its name.
    rustix::thread::set_name(c"qemu-nbd").map_err(std::io::Error::from)?;
    // Signals of the terminal end the first process alone. It fails only for the leader of a
    // group, which has its own already.
    let _ = rustix::process::setsid();
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    let mut out = std::io::stdout();
    out.write_all(READY)?;
    out.flush()?;
    // A caller that waits for the end of these pipes must not wait for the server.
    rustix::stdio::dup2_stdout(&null).map_err(std::io::Error::from)?;
    rustix::stdio::dup2_stderr(&null).map_err(std::io::Error::from)?;
    Ok(())
}
