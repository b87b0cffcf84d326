//! Dates as text, in UTC and in the time zone of the machine.

use std::path::PathBuf;

/// Seconds since 1970 as `2026-11-21 04:06:18`, in local time.
pub fn local(seconds: u32) -> String {
    let offset = zone().and_then(|zone| offset_at(&zone, seconds)).unwrap_or(0);
    text(i64::from(seconds) + offset)
}

/// Seconds since 1970 as `2026-11-21 04:06:18`, in UTC.
pub fn utc(seconds: u32) -> String {
    text(seconds.into())
}

/// A guest's clock as `0:00:07.125`: hours of at least `digits` digits, minutes, seconds, milliseconds.
pub fn clock(nanoseconds: u64, digits: usize) -> String {
    let (seconds, rest) = (nanoseconds / 1_000_000_000, nanoseconds % 1_000_000_000);
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    format!("{hours:0digits$}:{minutes:02}:{:02}.{:03}", seconds % 60, rest / 1_000_000)
}

fn text(seconds: i64) -> String {
    let (year, month, day) = civil(seconds.div_euclid(86_400));
    let rest = seconds.rem_euclid(86_400);
    format!(
        "{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02}",
        rest / 3600,
        rest / 60 % 60,
        rest % 60
    )
}

/// The content of the file that `TZ` names, or of the machine's own.
fn zone() -> Option<Vec<u8>> {
    let path = match std::env::var("TZ") {
        Ok(name) if name.is_empty() => return None,
        Ok(name) => {
            let name = name.strip_prefix(':').unwrap_or(&name);
            PathBuf::from("/usr/share/zoneinfo").join(name)
        }
        Err(_) => PathBuf::from("/etc/localtime"),
    };
    std::fs::read(path).ok()
}

/// Seconds to add to UTC at a moment, by the first part of a TZif file (RFC 8536), whose times have
/// 32 bits.
fn offset_at(zone: &[u8], seconds: u32) -> Option<i64> {
    const HEADER_BYTES: usize = 44;
    let word = |at: usize| Some(i32::from_be_bytes(*zone.get(at..)?.first_chunk()?));
    if !zone.starts_with(b"TZif") {
        return None;
    }
    let (times, types) = (word(32)? as usize, word(36)? as usize);
    let kinds = HEADER_BYTES.checked_add(times.checked_mul(4)?)?;
    let records = kinds.checked_add(times)?;
    let mut kind = 0;
    for i in 0..times {
        if i64::from(word(HEADER_BYTES + i * 4)?) > i64::from(seconds) {
            break;
        }
        kind = usize::from(*zone.get(kinds + i)?);
    }
    if kind >= types {
        return None;
    }
    word(records + kind * 6).map(i64::from)
}

/// The date of a day since 1970-01-01. Years are counted from March, so that the leap day comes
/// last.
fn civil(days: i64) -> (i64, i64, i64) {
    const DAYS_400_YEARS: i64 = 146_097;
    // 0000-03-01 is 719468 days before 1970-01-01.
    let days = days + 719_468;
    let era = days.div_euclid(DAYS_400_YEARS);
    let day_of_era = days.rem_euclid(DAYS_400_YEARS);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    (era * 400 + year_of_era + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zone_file_gives_the_offset_of_its_last_change() {
        let mut zone = b"TZif".to_vec();
        zone.resize(44, 0);
        zone[35] = 2;
        zone[39] = 2;
        for time in [1000_i32, 2000] {
            zone.extend(time.to_be_bytes());
        }
        zone.extend([1, 0]);
        for offset in [0_i32, 3600] {
            zone.extend(offset.to_be_bytes());
            zone.extend([0, 0]);
        }
        let at = |seconds| offset_at(&zone, seconds);
        assert_eq!([at(999), at(1000), at(1999), at(2000)], [0, 3600, 3600, 0].map(Some));
        assert_eq!(offset_at(b"TZif", 0), None);
    }

    #[test]
    fn seconds_become_dates() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00"),
            (951_782_399, "2000-02-28 23:59:59"),
            (951_782_400, "2000-02-29 00:00:00"),
            (1_795_233_978, "2026-11-21 04:06:18"),
            (u32::MAX, "2106-02-07 06:28:15"),
        ] {
            assert_eq!(utc(seconds), text);
        }
    }

    #[test]
    fn clocks_begin_with_the_hours() {
        assert_eq!(clock(0, 1), "0:00:00.000");
        assert_eq!(clock(7_125_900_000, 4), "0000:00:07.125");
        assert_eq!(clock(u64::MAX, 1), "5124095:34:33.709");
    }
}
