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

/// Seconds to add to UTC at a moment, by a TZif file (RFC 8536, section 3). Its rule for later times
/// than it lists is not read.
fn offset_at(zone: &[u8], seconds: u32) -> Option<i64> {
    let part = ZonePart::new(zone, 4)?;
    // Files of version 1 have times of 32 bits. In others that part may be empty, and one with 64
    // bits follows.
    if *zone.get(4)? == 0 {
        return part.offset_at(seconds);
    }
    ZonePart::new(zone.get(part.bytes()..)?, 8)?.offset_at(seconds)
}

/// A header of a TZif file with its data.
struct ZonePart<'z> {
    zone: &'z [u8],
    /// Bytes of a time.
    width: usize,
    times: usize,
    types: usize,
}

impl<'z> ZonePart<'z> {
    const HEADER_BYTES: usize = 44;

    fn new(zone: &'z [u8], width: usize) -> Option<Self> {
        let part = Self { zone, width, times: 0, types: 0 };
        let (times, types) = (part.count(3)?, part.count(4)?);
        (zone.starts_with(b"TZif")).then_some(Self { times, types, ..part })
    }

    /// One of the header's six counts: marks of UT and of standard time, leap seconds, times, types,
    /// bytes of names.
    fn count(&self, index: usize) -> Option<usize> {
        self.word(20 + index * 4)?.try_into().ok()
    }

    fn word(&self, at: usize) -> Option<i32> {
        Some(i32::from_be_bytes(*self.zone.get(at..)?.first_chunk()?))
    }

    /// Its size with all data.
    fn bytes(&self) -> usize {
        let [ut, standard, leaps, names] = [0, 1, 2, 5].map(|index| self.count(index).unwrap_or(0));
        let times = self.times * (self.width + 1);
        Self::HEADER_BYTES
            + times
            + self.types * 6
            + names
            + leaps * (self.width + 4)
            + standard
            + ut
    }

    fn offset_at(&self, seconds: u32) -> Option<i64> {
        let kinds = Self::HEADER_BYTES + self.times * self.width;
        let mut kind = 0;
        for i in 0..self.times {
            let at = self.zone.get(Self::HEADER_BYTES + i * self.width..)?;
            let time = match self.width {
                4 => i32::from_be_bytes(*at.first_chunk()?).into(),
                _ => i64::from_be_bytes(*at.first_chunk()?),
            };
            if time > i64::from(seconds) {
                break;
            }
            kind = usize::from(*self.zone.get(kinds + i)?);
        }
        let records = kinds + self.times;
        (kind < self.types).then(|| self.word(records + kind * 6))?.map(i64::from)
    }
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

    /// A part of a zone file: two changes of the offset, to an hour and back.
    fn part(version: u8, width: usize, changes: [i64; 2]) -> Vec<u8> {
        let mut part = b"TZif".to_vec();
        part.push(version);
        part.resize(44, 0);
        (part[35], part[39], part[43]) = (2, 2, 4);
        for time in changes {
            part.extend(&time.to_be_bytes()[8 - width..]);
        }
        part.extend([1, 0]);
        for offset in [0_i32, 3600] {
            part.extend(offset.to_be_bytes());
            part.extend([0, 0]);
        }
        part.extend(b"UTC\0");
        part
    }

    #[test]
    fn a_zone_file_gives_the_offset_of_its_last_change() {
        let zone = part(0, 4, [1000, 2000]);
        let at = |seconds| offset_at(&zone, seconds);
        assert_eq!([at(999), at(1000), at(1999), at(2000)], [0, 3600, 3600, 0].map(Some));
        assert_eq!(offset_at(b"TZif", 0), None);
    }

    #[test]
    fn times_of_64_bits_are_preferred() {
        let zone = [part(b'2', 4, [1000, 2000]), part(b'2', 8, [3000, 1 << 33])].concat();
        let at = |seconds| offset_at(&zone, seconds);
        assert_eq!([at(2999), at(3000), at(u32::MAX)], [0, 3600, 3600].map(Some));
        for len in 0..zone.len() {
            let _ = offset_at(&zone[..len], u32::MAX);
        }
        assert_eq!(offset_at(&zone[..part(b'2', 4, [0; 2]).len()], 0), None);
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
