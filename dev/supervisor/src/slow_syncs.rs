//! Makes syncs as slow as on a slow device.

use std::collections::VecDeque;
use std::io;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::filter::Filter;
use crate::listener::{Listener, Ready};
use crate::spawn::{install, spawn};

/// Syncs per calibration; the median counts.
const TRIAL_SYNCS: usize = 40;

/// Runs programs whose syncs take at least a given time.
///
/// A sync is a call of fsync or fdatasync, or a write with RWF_DSYNC or RWF_SYNC. (Writes to a file
/// opened with O_DSYNC or O_SYNC do not count.) It is delayed and then executed normally. Any
/// number of syncs wait concurrently, of one file or several, as on a device with a queue; other
/// calls are not delayed. One thread of this process keeps the time, with a timer slack of a
/// nanosecond.
#[derive(Clone, Copy, Debug)]
pub struct SlowSyncs {
    takes: Duration,
    /// Each sync waits for earlier ones.
    one_at_a_time: bool,
    /// Cost of the interception and wake-up, subtracted from each delay.
    overhead: Duration,
}

impl SlowSyncs {
    /// Calibrates the cost of interception, in a thread of this process.
    ///
    /// # Errors
    /// If the kernel has no user notification.
    pub fn new(takes: Duration) -> io::Result<Self> {
        let plain = Self { takes, one_at_a_time: false, overhead: Duration::ZERO };
        let overhead = plain.measure()?.saturating_sub(takes);
        Ok(Self { overhead, ..plain })
    }

    /// Simulates a device that runs one sync after the other, so that the number of syncs matters.
    pub fn one_at_a_time(self) -> Self {
        Self { one_at_a_time: true, ..self }
    }

    /// The median time of a single sync, which shows the precision.
    ///
    /// # Errors
    /// As [`SlowSyncs::new`].
    pub fn measure(&self) -> io::Result<Duration> {
        let file = rustix::fs::memfd_create("synced", rustix::fs::MemfdFlags::CLOEXEC)?;
        let (pass, listener) = std::sync::mpsc::channel();
        let tried = std::thread::spawn(move || -> io::Result<Vec<Duration>> {
            let listener = install(Filter::syncs().program())?;
            pass.send(listener).map_err(io::Error::other)?;
            let mut times = Vec::new();
            for _ in 0..TRIAL_SYNCS {
                let began = Instant::now();
                rustix::fs::fdatasync(&file)?;
                times.push(began.elapsed());
            }
            times.sort_unstable();
            Ok(times)
        });
        if let Ok(listener) = listener.recv() {
            // Timer slack is per thread, so use a separate thread.
            std::thread::scope(|scope| {
                scope
                    .spawn(|| self.serve(&listener, &AtomicU64::new(0)))
                    .join()
                    .unwrap_or_else(|_| Err(io::Error::other("the supervisor panicked")))
            })?;
        }
        let times = tried.join().unwrap_or_else(|_| Err(io::Error::other("the trial panicked")))?;
        Ok(times[times.len() / 2])
    }

    /// Starts a program with slow syncs.
    ///
    /// # Errors
    /// As [`spawn`].
    pub fn spawn(&self, command: Command) -> io::Result<Supervised> {
        let (child, listener) = spawn(command, &Filter::syncs())?;
        let (slow, syncs) = (*self, Arc::new(AtomicU64::new(0)));
        let count = Arc::clone(&syncs);
        let supervisor = std::thread::Builder::new()
            .name("slow syncs".to_owned())
            .spawn(move || slow.serve(&listener, &count))?;
        Ok(Supervised { child, syncs, supervisor: Some(supervisor) })
    }

    /// Delays syncs until no supervised thread is left.
    fn serve(self, listener: &Listener, count: &AtomicU64) -> io::Result<()> {
        // By default timers expire up to 50 µs late, to be grouped.
        rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1))?;
        let waits = self.takes.saturating_sub(self.overhead);
        // The first to arrive is due first.
        let mut waiting: VecDeque<(Instant, u64)> = VecDeque::new();
        loop {
            let timeout =
                waiting.front().map(|(due, _)| due.saturating_duration_since(Instant::now()));
            match listener.wait(timeout)? {
                Ready::Call => {
                    if let Some(call) = listener.receive()? {
                        count.fetch_add(1, Ordering::Relaxed);
                        let last = waiting.back().filter(|_| self.one_at_a_time);
                        // A sync that arrives at a busy device is queued before its turn.
                        let due = match last {
                            Some((before, _)) => *before + self.takes,
                            None => Instant::now() + waits,
                        };
                        waiting.push_back((due, call.id));
                    }
                }
                Ready::Ended => return Ok(()),
                Ready::TimedOut => {}
            }
            let now = Instant::now();
            while let Some((_, id)) = waiting.pop_front_if(|(due, _)| *due <= now) {
                listener.proceed(id)?;
            }
        }
    }
}

/// A supervised program; killed on drop.
#[derive(Debug)]
pub struct Supervised {
    /// The program.
    pub child: Child,
    syncs: Arc<AtomicU64>,
    supervisor: Option<JoinHandle<io::Result<()>>>,
}

impl Supervised {
    /// Syncs so far.
    pub fn syncs(&self) -> u64 {
        self.syncs.load(Ordering::Relaxed)
    }
}

impl Drop for Supervised {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(Ok(Err(error))) = self.supervisor.take().map(JoinHandle::join) {
            eprintln!("slow syncs: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sync_is_counted_and_the_program_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let slow = SlowSyncs::new(Duration::from_micros(100)).unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo x >a; sync -d a; sync a; dd if=a of=b oflag=dsync status=none"]);
        let mut run = slow.spawn({
            command.current_dir(folder.path());
            command
        });
        let run = run.as_mut().unwrap();
        assert!(run.child.wait().unwrap().success());
        assert_eq!(run.syncs(), 2, "O_DSYNC is no call");
        assert_eq!(std::fs::read(folder.path().join("b")).unwrap(), b"x\n");
    }

    #[test]
    fn a_sync_never_takes_less() {
        let takes = Duration::from_millis(2);
        let slow = SlowSyncs { takes, one_at_a_time: false, overhead: Duration::ZERO };
        assert!(slow.measure().unwrap() >= takes);
    }
}
