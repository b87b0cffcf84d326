//! A process that may do nothing but read what it has open, compute and answer.
//!
//! | what | keeps away |
//! |---|---|
//! | resource limits | endless memory and processor time, files written, files opened, core dumps |
//! | `no_new_privs` | programs that would give more rights |
//! | Landlock, no rule | every file of every file system; TCP; signals and abstract sockets |
//! | seccomp, an allow-list | every system call that is not in [`ALLOWED`]: it ends the process |
//!
//! Each works without the others; where the kernel lacks one, the rest still holds and
//! [`Sandbox::complete`] says so.

use std::io;

use landlock::{
    ABI, Access, AccessFs, AccessNet, LandlockStatus, Ruleset, RulesetAttr, RulesetStatus, Scope,
};
use rustix::process::{Resource, Rlimit, setrlimit};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use serde::{Deserialize, Serialize};

/// The parts of the sandbox that this kernel supports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Sandbox {
    /// Whether every part is in force.
    pub complete: bool,
    /// The enforced version of Landlock; 0 for none.
    pub landlock_abi: u32,
    /// Whether system calls are filtered.
    pub seccomp: bool,
    /// Whether resource limits are set.
    pub limits: bool,
}

/// Address space beyond the memory limit: the program itself, stacks, and what the allocator
/// reserves without using it.
const ADDRESS_SPACE_BESIDE: u64 = 512 << 20;

/// Enters the sandbox, which cannot be left. Call it while the process has one thread.
pub fn enter(memory_bytes: u64, cpu_seconds: u64) -> Sandbox {
    // First, because creating a ruleset takes a descriptor.
    let landlock_abi = landlock();
    let limits = limit(memory_bytes, cpu_seconds).is_ok();
    let seccomp = seccomp().is_ok();
    Sandbox { complete: limits && landlock_abi > 0 && seccomp, landlock_abi, seccomp, limits }
}

/// Sets the resource limits.
///
/// # Errors
/// The system refuses one of them.
pub fn limit(memory_bytes: u64, cpu_seconds: u64) -> io::Result<()> {
    let set = |resource, most: u64| {
        setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })
    };
    set(Resource::Core, 0)?;
    set(Resource::Fsize, 0)?;
    set(Resource::Nofile, 0)?;
    // Beyond the first the process gets SIGXCPU, which says why; beyond the second, SIGKILL.
    let cpu_seconds = cpu_seconds.max(1);
    let maximum = Some(cpu_seconds.saturating_add(1));
    setrlimit(Resource::Cpu, Rlimit { current: Some(cpu_seconds), maximum })?;
    set(Resource::As, memory_bytes.saturating_add(ADDRESS_SPACE_BESIDE))?;
    set(Resource::Data, memory_bytes)?;
    Ok(())
}

/// Denies access to all files, and to as much more as this kernel's Landlock can deny. Returns the
/// enforced version, or 0. Sets `no_new_privs` in any case.
pub fn landlock() -> u32 {
    // The library leaves out rights that the kernel does not know.
    let newest = ABI::V9;
    let restricted = Ruleset::default()
        .handle_access(AccessFs::from_all(newest))
        .and_then(|ruleset| ruleset.handle_access(AccessNet::from_all(newest)))
        .and_then(|ruleset| ruleset.scope(Scope::from_all(newest)))
        .and_then(Ruleset::create)
        .and_then(|created| created.restrict_self());
    let Ok(status) = restricted else { return 0 };
    match status.landlock {
        LandlockStatus::Available { effective_abi, kernel_abi }
            if status.ruleset != RulesetStatus::NotEnforced =>
        {
            let known =
                [ABI::V1, ABI::V2, ABI::V3, ABI::V4, ABI::V5, ABI::V6, ABI::V7, ABI::V8, ABI::V9];
            let effective = known.iter().filter(|&&abi| abi <= effective_abi).count() as u32;
            kernel_abi.and_then(|abi| u32::try_from(abi).ok()).unwrap_or(effective)
        }
        _ => 0,
    }
}

/// System calls that computing and reading need, whatever their arguments.
pub const ALLOWED: &[libc::c_long] = &[
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_close,
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_restart_syscall,
    libc::SYS_clock_gettime,
    libc::SYS_getrandom,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // The second filter answers ENOSYS, so that the C library uses clone.
    libc::SYS_clone3,
];

/// ioctl that returns the size of a block device.
const BLKGETSIZE64: u64 = 0x8008_1272;

type Answer<T> = Result<T, seccompiler::Error>;

fn rule(argument: u8, operator: SeccompCmpOp, value: u64) -> Answer<Vec<SeccompRule>> {
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Qword, operator, value)?;
    Ok(vec![SeccompRule::new(vec![condition])?])
}

/// Filters the system calls of this thread and of threads that it creates. A system call that is
/// not allowed ends the process.
///
/// # Errors
/// The kernel or the architecture has no seccomp.
pub fn seccomp() -> Result<(), seccompiler::Error> {
    let arch: TargetArch = std::env::consts::ARCH.try_into()?;
    let masked = |mask: i32| SeccompCmpOp::MaskedEq(mask as u64);
    let threads = libc::CLONE_THREAD | libc::CLONE_VM;
    let own_process = u64::from(std::process::id());
    let mut rules: std::collections::BTreeMap<i64, Vec<SeccompRule>> =
        ALLOWED.iter().map(|&call| (call, Vec::new())).collect();
    rules.extend([
        // Threads, never processes.
        (libc::SYS_clone, rule(0, masked(threads), threads as u64)?),
        // Memory, never code.
        (libc::SYS_mmap, rule(2, masked(libc::PROT_EXEC), 0)?),
        (libc::SYS_mprotect, rule(2, masked(libc::PROT_EXEC), 0)?),
        // Aborting this process, never another one.
        (libc::SYS_tgkill, rule(0, SeccompCmpOp::Eq, own_process)?),
        (libc::SYS_prctl, rule(0, SeccompCmpOp::Eq, libc::PR_SET_NAME as u64)?),
        // Builds with debug assertions query a descriptor before they close it.
        (libc::SYS_fcntl, rule(1, SeccompCmpOp::Eq, libc::F_GETFD as u64)?),
        (libc::SYS_ioctl, rule(1, SeccompCmpOp::Eq, BLKGETSIZE64)?),
    ]);
    let kill = SeccompAction::KillProcess;
    let allow_list = SeccompFilter::new(rules, kill, SeccompAction::Allow, arch)?;
    let no_clone3 = SeccompFilter::new(
        [(libc::SYS_clone3, Vec::new())].into_iter().collect(),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::ENOSYS as u32),
        arch,
    )?;
    let allow_list: BpfProgram = allow_list.try_into()?;
    let no_clone3: BpfProgram = no_clone3.try_into()?;
    // The allow-list comes last, because it forbids adding filters.
    seccompiler::apply_filter(&no_clone3)?;
    seccompiler::apply_filter(&allow_list)
}
