//! Selects the system calls to pass to the supervisor: a BPF program for seccomp.

use libc::{c_long, sock_filter};

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xc000_00b7;

/// Offsets in `struct seccomp_data`.
const NUMBER_AT: u32 = 0;
const ARCHITECTURE_AT: u32 = 4;
const ARGUMENTS_AT: u32 = 16;

/// Flags of `pwritev2` that make a write durable when it returns: RWF_DSYNC and RWF_SYNC.
pub const SYNC_FLAGS: u32 = 0x2 | 0x4;

/// Rules for system calls; calls without a rule run normally. The first rule for a call decides.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    program: Vec<sock_filter>,
}

fn statement(code: u32, k: u32) -> sock_filter {
    sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

/// Compares the loaded value, and skips `if_so` or `if_not` statements.
fn jump(code: u32, k: u32, if_so: u8, if_not: u8) -> sock_filter {
    sock_filter { code: code as u16, jt: if_so, jf: if_not, k }
}

fn load(at: u32) -> sock_filter {
    statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, at)
}

fn equals(k: u32, if_not: u8) -> sock_filter {
    jump(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, k, 0, if_not)
}

fn verdict(action: u32) -> sock_filter {
    statement(libc::BPF_RET | libc::BPF_K, action)
}

fn number(call: c_long) -> u32 {
    u32::try_from(call).expect("a system call's number")
}

impl Filter {
    /// A filter without rules.
    pub fn new() -> Self {
        Self {
            program: vec![
                load(ARCHITECTURE_AT),
                equals(ARCHITECTURE, 1),
                // Load the call's number, for all rules.
                jump(libc::BPF_JMP | libc::BPF_JA, 1, 0, 0),
                verdict(libc::SECCOMP_RET_ALLOW),
                load(NUMBER_AT),
            ],
        }
    }

    /// Passes on everything that makes bytes durable. Refuses `io_uring`, through which syncs would
    /// be invisible; programs work without it.
    pub fn syncs() -> Self {
        Self::new()
            .pass(libc::SYS_fsync)
            .pass(libc::SYS_fdatasync)
            .pass_if(libc::SYS_pwritev2, 5, SYNC_FLAGS)
            .refuse(libc::SYS_io_uring_setup, libc::ENOSYS)
            .refuse(libc::SYS_io_setup, libc::ENOSYS)
    }

    /// Passes the call on.
    pub fn pass(self, call: c_long) -> Self {
        self.rule(call, libc::SECCOMP_RET_USER_NOTIF)
    }

    /// Passes the call on if one of these bits is set in an argument, counted from 0.
    pub fn pass_if(mut self, call: c_long, argument: u32, bits: u32) -> Self {
        self.program.extend([
            equals(number(call), 4),
            // The lower half; the supported machines are little-endian.
            load(ARGUMENTS_AT + 8 * argument),
            jump(libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K, bits, 0, 1),
            verdict(libc::SECCOMP_RET_USER_NOTIF),
            verdict(libc::SECCOMP_RET_ALLOW),
        ]);
        self
    }

    /// Fails the call with this error.
    pub fn refuse(self, call: c_long, errno: i32) -> Self {
        self.rule(call, libc::SECCOMP_RET_ERRNO | errno as u32)
    }

    fn rule(mut self, call: c_long, action: u32) -> Self {
        self.program.extend([equals(number(call), 1), verdict(action)]);
        self
    }

    /// The program in the kernel's format.
    pub(crate) fn program(&self) -> Vec<sock_filter> {
        let mut program = self.program.clone();
        program.push(verdict(libc::SECCOMP_RET_ALLOW));
        program
    }
}
