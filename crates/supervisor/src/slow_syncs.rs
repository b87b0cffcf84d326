//! Syncs that take as long as on a slow device.

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

/// Syncs of which a trial takes the median.
const TRIAL_SYNCS: usize = 40;

/// Programs under which each sync takes a given time at least.
///
/// A sync is a call of fsync or fdatasync, or a write with RWF_DSYNC or RWF_SYNC. (Writes to a file
/// that was opened with O_DSYNC or O_SYNC are none.) It waits so long and is then done as always.
/// Any number of syncs wait side by side, whether of one file or of several, as on a device with a
/// queue; nothing else waits for them. One thread of this process keeps the time, with a timer whose
/// slack is a nanosecond.
#[derive(Clone, Copy, Debug)]
pub struct SlowSyncs {
    takes: Duration,
    /// Each waits for those before it.
    one_at_a_time: bool,
    /// What passing a call on and waking up costs: each wait is shorter by so much.
    overhead: Duration,
}

impl SlowSyncs {
    /// Finds out, by trial in a thread of this process, what supervision itself costs.
    ///
    /// # Errors
    /// Where the kernel has no user notification.
    pub fn new(takes: Duration) -> io::Result<Self> {
        let plain = Self { takes, one_at_a_time: false, overhead: Duration::ZERO };
        let overhead = plain.measure()?.saturating_sub(takes);
        Ok(Self { overhead, ..plain })
    }

    /// The same on a device that does one sync after the other, each for itself: there the number
    /// of syncs is what counts.
    pub fn one_at_a_time(self) -> Self {
        Self { one_at_a_time: true, ..self }
    }

    /// The median time of a sync that runs alone: how exact this is.
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
            // A timer's slack belongs to the thread, which therefore is one of its own.
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

    /// Starts a program under these conditions.
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

    /// Lets syncs wait until nobody is left who could call.
    fn serve(self, listener: &Listener, count: &AtomicU64) -> io::Result<()> {
        // Otherwise timers ring up to 50 µs late, so that they ring together.
        rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1))?;
        let waits = self.takes.saturating_sub(self.overhead);
        // The first that came is due first.
        let mut waiting: VecDeque<(Instant, u64)> = VecDeque::new();
        loop {
            let timeout =
                waiting.front().map(|(due, _)| due.saturating_duration_since(Instant::now()));
            match listener.wait(timeout)? {
                Ready::Call => {
                    if let Some(call) = listener.receive()? {
                        count.fetch_add(1, Ordering::Relaxed);
                        let last = waiting.back().filter(|_| self.one_at_a_time);
                        // One that comes to a device at work is there before its turn.
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

/// A program under supervision; killed when this is dropped.
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
