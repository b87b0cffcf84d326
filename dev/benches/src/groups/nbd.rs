//! What the groups that drive NBD servers share.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::pair::{Cell, CellName, Series, order_of};
use crate::process::{Usage, interrupted};

/// A server has so long to come up.
const START: Duration = Duration::from_secs(20);

/// A server that is killed at the end.
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A command without input and output.
pub fn quiet(command: &mut Command) -> &mut Command {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null())
}

/// Runs servers in turn, round by round; the first round warms up. `run` measures one of them.
pub fn measure(
    name: CellName,
    guest_bytes: u64,
    mut series: Vec<Series>,
    rounds: usize,
    run: impl Fn(usize) -> Result<Usage>,
) -> Result<Cell> {
    for round in 0..=rounds {
        for index in order_of(round, series.len()) {
            if interrupted() {
                bail!("interrupted");
            }
            match run(index) {
                Ok(usage) if round > 0 => series[index].runs.push(usage),
                Ok(_) => {}
                Err(error) => series[index].cannot = Some(format!("{error:#}")),
            }
        }
    }
    let cell = Cell { name, guest_bytes, series };
    eprintln!("{}", cell.short());
    Ok(cell)
}

/// Waits until the server listens.
pub fn wait_for(socket: &Path) -> Result<()> {
    let began = Instant::now();
    while UnixStream::connect(socket).is_err() {
        if began.elapsed() > START {
            bail!("nobody listens at {}", socket.display());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// What fio did.
pub struct Requests {
    /// Requests that were answered.
    pub count: f64,
    /// From the first request to the last answer.
    pub seconds: f64,
}

/// fio's JSON: the requests of its first job (or of all, with group_reporting), and all it says of
/// that job.
pub fn answer_of(file: &Path) -> Result<(Requests, Value)> {
    let text = fs::read_to_string(file)?;
    // fio puts its own remarks before the JSON.
    let json = text.find('{').map_or("", |start| &text[start..]);
    let mut parsed: Value = serde_json::from_str(json).context("fio's answer")?;
    let result = parsed["jobs"][0].take();
    let mut total = Requests { count: 0.0, seconds: 0.0 };
    for side in ["read", "write"] {
        total.count += result[side]["total_ios"].as_f64().unwrap_or(0.0);
        let millis = result[side]["runtime"].as_f64().unwrap_or(0.0);
        total.seconds = total.seconds.max(millis / 1e3);
    }
    if total.count == 0.0 || total.seconds == 0.0 {
        bail!("fio did nothing");
    }
    Ok((total, result))
}

/// Seconds of processor time so far, in user mode and in the kernel.
pub fn processor(pid: u32) -> Result<(f64, f64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name in parentheses may hold anything.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    let field = |index: usize| -> Result<f64> {
        Ok(fields.get(index).context("/proc/PID/stat")?.parse::<f64>()? / ticks)
    };
    Ok((field(11)?, field(12)?))
}

/// Seconds of processor time so far, to the nanosecond: user mode and kernel together.
pub fn processor_exact(pid: u32) -> Result<f64> {
    let (pid, mut clock) = (libc::pid_t::try_from(pid)?, 0);
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a live local of the right type.
    let known = unsafe { libc::clock_getcpuclockid(pid, &raw mut clock) };
    if known != 0 {
        bail!("process {pid} has no clock");
    }
    // SAFETY: as above.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Err(std::io::Error::last_os_error()).context("clock_gettime");
    }
    Ok(time.tv_sec as f64 + time.tv_nsec as f64 / 1e9)
}

/// The most memory that a process has had, in bytes.
pub fn memory_peak(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().split(' ').next()).unwrap_or("0");
    Ok(kib.parse::<u64>()? * 1024)
}
