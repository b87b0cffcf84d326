//! Formats times. Dates are in UTC, so that an answer is the same everywhere.

/// Formats seconds since 1970 as `2026-11-21 04:06:18`.
pub fn utc(seconds: u32) -> String {
    let days = i64::from(seconds / 86400);
    let (year, month, day) = civil(days);
    let rest = seconds % 86400;
    format!(
        "{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02}",
        rest / 3600,
        rest / 60 % 60,
        rest % 60
    )
}

/// Formats a machine's uptime as `0:00:07.125`, hours first.
pub fn clock(nanoseconds: u64) -> String {
    let (seconds, rest) = (nanoseconds / 1_000_000_000, nanoseconds % 1_000_000_000);
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    format!("{hours}:{minutes:02}:{:02}.{:03}", seconds % 60, rest / 1_000_000)
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
    fn dates() {
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
    fn clocks() {
        assert_eq!(clock(0), "0:00:00.000");
        assert_eq!(clock(7_125_900_000), "0:00:07.125");
        assert_eq!(clock(u64::MAX), "5124095:34:33.709");
    }
}
