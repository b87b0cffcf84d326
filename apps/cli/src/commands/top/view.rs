//! Renders an interval as text.

use super::rates::{OpRates, Rates};
use crate::failure::printable;
use crate::output::bytes_short;

/// The lines: the served image, a table of the kinds of request, and further values.
pub fn lines(rates: &Rates) -> Vec<String> {
    let status = &rates.status;
    let mut lines = vec![
        format!(
            "{}  {}{}  up {}",
            printable(&status.filename).replace('\n', "\\n"),
            bytes_short(status.virtual_size),
            if status.read_only { "  read-only" } else { "" },
            clock(status.uptime_seconds)
        ),
        format!(
            "{:<8}{:>12}{:>15}{:>8}{:>10}{:>10}{:>10}",
            "", "requests/s", "bytes/s", "errors", "mean", "p50", "p99"
        ),
    ];
    lines.extend(rates.ops.iter().map(row));
    if let Some(share) = rates.fast_lane_share {
        lines.push(format!(
            "inline   {} of the requests completed without blocking",
            percent(share)
        ));
    }
    lines.extend(cache(rates));
    if status.paused {
        lines.push("PAUSED   to resume: vdkit ctl SOCKET resume".to_owned());
    }
    if status.parked.requests > 0 {
        let parked = &status.parked;
        lines.push(format!(
            "FULL     writes and discards waiting for space: {} ({}), the oldest for {}: {}",
            parked.requests,
            bytes_short(parked.bytes),
            clock(parked.seconds),
            printable(&parked.reason).replace('\n', " ")
        ));
    }
    lines
}

fn row(op: &OpRates) -> String {
    let times = if op.requests_per_second > 0.0 {
        [op.mean_microseconds, op.p50_microseconds, op.p99_microseconds].map(time)
    } else {
        ["", "", ""].map(str::to_owned)
    };
    format!(
        "{:<8}{:>12.0}{:>15}{:>8}{:>10}{:>10}{:>10}",
        op.kind.name(),
        op.requests_per_second,
        format!("{}/s", bytes_short(op.bytes_per_second as u64)),
        op.errors,
        times[0],
        times[1],
        times[2]
    )
    .trim_end()
    .to_owned()
}

fn cache(rates: &Rates) -> Option<String> {
    let cache = rates.map_cache.as_ref()?;
    let found = match cache.hit_share {
        Some(share) => {
            format!("{} of {:.0} lookups/s hit; ", percent(share), cache.lookups_per_second)
        }
        None => String::new(),
    };
    Some(format!(
        "map      {found}cache: {} used of {}; the whole map: {}",
        bytes_short(cache.used_bytes),
        bytes_short(cache.capacity_bytes),
        bytes_short(cache.map_bytes)
    ))
}

fn percent(share: f64) -> String {
    // Round down, so that only a full share is shown as 100 %.
    format!("{:.1} %", (share * 1000.0).floor() / 10.0)
}

fn time(micros: f64) -> String {
    match micros {
        us if us < 999.5 => format!("{us:.0} µs"),
        us if us < 999_500.0 => format!("{:.1} ms", us / 1e3),
        us => format!("{:.1} s", us / 1e6),
    }
}

/// Formats seconds, such as `1:02:03`.
fn clock(seconds: f64) -> String {
    let seconds = seconds.clamp(0.0, 1e12) as u64;
    format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::super::rates::tests::sample;
    use super::*;

    #[test]
    fn an_interval_in_lines() {
        let now = Instant::now();
        let mut later = sample(now + Duration::from_secs(1), 3723.0, 29_120, &[]);
        later.status.filename = "a\x1b[2Jb.qcow2".to_owned();
        later.status.paused = true;
        later.status.parked.requests = 2;
        later.status.parked.bytes = 128 << 10;
        let rates = Rates::between(&sample(now, 3722.0, 0, &[]), &later);
        let text = lines(&rates).join("\n");
        assert!(!text.contains('\x1b'), "{text}");
        assert!(text.contains(".qcow2  64 GiB  up 1:02:03\n"), "{text}");
        assert!(text.contains("\nread           29120    113.8 MiB/s"), "{text}");
        assert!(text.contains("\nwrite              0          0 B/s       0\n"), "{text}");
        assert!(
            text.contains("inline   75.0 % of the requests completed without blocking"),
            "{text}"
        );
        assert!(text.contains("cache: 1 MiB used of 32 MiB; the whole map: 8 MiB"), "{text}");
        assert!(
            text.contains("PAUSED") && text.contains("waiting for space: 2 (128 KiB)"),
            "{text}"
        );
    }

    #[test]
    fn times_and_shares() {
        for (micros, text) in
            [(0.4, "0 µs"), (999.0, "999 µs"), (999.9, "1.0 ms"), (1.5e6, "1.5 s")]
        {
            assert_eq!(time(micros), text);
        }
        assert_eq!((percent(0.9999), percent(1.0)), ("99.9 %".to_owned(), "100.0 %".to_owned()));
    }
}
