//! Starting a program under a filter.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::process::{Child, Command};

use libc::{c_int, c_ulong, sock_filter};

use crate::filter::Filter;
use crate::listener::Listener;

/// Starts a program whose calls are passed to the listener from its first instruction on.
///
/// A separate thread installs the filter and starts the program, which inherits it. If the listener
/// is dropped, intercepted calls fail with ENOSYS.
///
/// # Errors
/// If the program cannot be started, or the kernel has no user notification.
pub fn spawn(mut command: Command, filter: &Filter) -> io::Result<(Child, Listener)> {
    let program = filter.program();
    within(move || {
        let listener = install(program)?;
        Ok((command.spawn()?, listener))
    })
}

/// Runs `work` in a separate thread.
fn within<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let thread = std::thread::Builder::new().name("starts a program".to_owned()).spawn(work)?;
    thread.join().unwrap_or_else(|_| Err(io::Error::other("the starting thread panicked")))
}

/// Installs a filter on this thread permanently.
pub(crate) fn install(mut program: Vec<sock_filter>) -> io::Result<Listener> {
    let program = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(io::Error::other)?,
        filter: program.as_mut_ptr(),
    };
    // Unprivileged users may do this only if the program cannot gain privileges.
    rustix::thread::set_no_new_privs(true)?;
    // Non-fatal signals wait until a received call is answered. Otherwise the call would be
    // restarted, and a supervisor that executed it would do so twice.
    let flags: c_ulong = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER
        | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
        | libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;
    // SAFETY: the program is alive for the time of the call, which copies it.
    let made = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            flags,
            std::ptr::from_ref(&program),
        )
    };
    if made < 0 {
        return Err(io::Error::last_os_error());
    }
    let fd = c_int::try_from(made).map_err(io::Error::other)?;
    // SAFETY: the call has made this descriptor, and nobody else knows of it.
    Ok(Listener(unsafe { OwnedFd::from_raw_fd(fd) }))
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;
    use crate::listener::Ready;

    /// The listener's next call.
    fn next(listener: &Listener) -> crate::Call {
        loop {
            assert_eq!(listener.wait(None).unwrap(), Ready::Call);
            if let Some(call) = listener.receive().unwrap() {
                return call;
            }
        }
    }

    #[test]
    fn syncs_of_one_file_wait_side_by_side_and_get_their_answers() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "sync -d \"$0\" & sync -d \"$0\"; echo $?; wait $!; echo $?"]);
        command.arg(file.path()).stdout(Stdio::piped()).stderr(Stdio::null());
        let (child, listener) = spawn(command, &Filter::syncs()).unwrap();
        // Both calls are pending before either returns.
        let calls = [next(&listener), next(&listener)];
        assert!(calls.iter().all(|call| call.number == libc::SYS_fdatasync), "{calls:?}");
        assert_ne!(calls[0].thread, calls[1].thread);
        listener.answer(calls[0].id, Err(rustix::io::Errno::IO)).unwrap();
        listener.proceed(calls[1].id).unwrap();
        let said = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
        let mut codes: Vec<_> = said.lines().collect();
        codes.sort_unstable();
        assert_eq!(codes, ["0", "1"], "one of them failed, as it was told");
        assert_eq!(listener.wait(None).unwrap(), Ready::Ended);
    }

    #[test]
    fn who_is_killed_while_waiting_is_forgotten() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut command = Command::new("sync");
        command.arg("-d").arg(file.path());
        let (mut child, listener) = spawn(command, &Filter::syncs()).unwrap();
        let call = next(&listener);
        child.kill().unwrap();
        child.wait().unwrap();
        listener.proceed(call.id).unwrap();
        assert_eq!(listener.wait(None).unwrap(), Ready::Ended);
    }
}
