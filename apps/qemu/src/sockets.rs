//! Sockets that a service manager hands over.

use listenfd::ListenFd;
use vdkit::nbd::Listener;

/// The environment's variable with the id of the process that sockets are handed to.
pub const PROCESS: &str = "LISTEN_PID";

/// Number of sockets that a service manager handed to this process, and to no other.
pub fn count() -> usize {
    let number = |name| std::env::var(name).ok()?.parse().ok();
    let own = number(PROCESS) == Some(std::process::id() as usize);
    number("LISTEN_FDS").filter(|_| own).unwrap_or(0)
}

/// The listening sockets that systemd handed over (`LISTEN_FDS`).
///
/// # Errors
/// One of them is no stream socket.
pub fn handed_over() -> Result<Vec<Listener>, String> {
    let mut handed = ListenFd::from_env();
    let count = handed.len();
    let socket = |index| {
        if let Ok(Some(socket)) = handed.take_unix_listener(index) {
            return Ok(Listener::Handed(socket));
        }
        match handed.take_tcp_listener(index) {
            Ok(Some(socket)) => Ok(Listener::Tcp(socket)),
            Ok(None) => Err(format!("socket {index} of systemd is missing")),
            Err(error) => Err(format!("socket {index} of systemd: {error}")),
        }
    };
    (0..count).map(socket).collect()
}
