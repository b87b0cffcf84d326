//! Decides whether to trust the header before a repair relies on it.
//!
//! One flipped feature bit (extended L2 entries, data file) makes a sound mapping look invalid, or
//! half of its clusters like leaks. A repair would destroy the mapping.

use vdkit_block::{Error, Monitor, Result};

use crate::check::image::Image;
use crate::check::survey::{Mode, Survey};
use crate::layout::{EXTENDED_CLUSTER_BITS_MIN, incompatible};
use crate::structures::header_offset;

/// With fewer faults, the header is trusted.
const FAULTS_MIN: u64 = 8;
/// Another interpretation is preferred if it has this many times fewer faults.
const FEWER: u64 = 8;

/// [`Error::Corrupt`] if the header is more likely wrong than the metadata.
pub(super) fn refuse_wrong_header(
    image: &Image,
    survey: &Survey,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let header = &image.header;
    if !header.has_data_file() && header.data_file_name().is_some() {
        return refuse(
            image,
            "the name of a data file without the bit that says there is one",
            "both or neither",
        );
    }
    let faults = faults(survey);
    if faults < FAULTS_MIN {
        return Ok(());
    }
    for (bit, name) in
        [(incompatible::EXTENDED_L2, "extended L2 entries"), (incompatible::DATA_FILE, "data file")]
    {
        let vouched = header.data_file_name().is_some()
            || header.has_data_file() && survey.structural(image) == 0;
        if bit == incompatible::DATA_FILE && vouched {
            // The data file name confirms the bit, and so does each entry at its guest offset.
            // Clusters that a writer had preallocated before a crash look like leaks. Without the
            // bit, some of these leaks vanish, because entries of the data file happen to name
            // them.
            continue;
        }
        let other = other_reading(image, bit, monitor)?;
        if other.is_some_and(|other| other * FEWER <= faults) {
            return refuse(
                image,
                &format!("a {name} bit with which {faults} errors are found, and few without"),
                "the other value of that bit",
            );
        }
    }
    // A single cluster may not be a table, but most of them must be.
    let implausible =
        survey.tables.iter().filter(|table| table.implausible * 2 > table.used).count();
    if implausible > 1 && implausible * 2 > survey.tables.len() {
        return refuse(
            image,
            &format!(
                "a header with which {implausible} of {} L2 tables are invalid",
                survey.tables.len()
            ),
            "one that fits the mapping",
        );
    }
    Ok(())
}

fn refuse(image: &Image, found: &str, expected: &str) -> Result<()> {
    let expected = format!("{expected} (nothing was changed)");
    let field = header_offset!(incompatible_features);
    Err(Error::corrupt(image.name(), field, "header", found, expected))
}

fn faults(survey: &Survey) -> u64 {
    survey.report.corruptions + survey.report.leaks
}

/// Number of faults with the other value of a feature bit; `None` if that value is impossible.
fn other_reading(image: &Image, bit: u64, monitor: &Monitor<'_>) -> Result<Option<u64>> {
    let mut other = image.clone();
    other.header.incompatible ^= bit;
    let geometry = &mut other.header.geometry;
    geometry.extended = other.header.incompatible & incompatible::EXTENDED_L2 != 0;
    let possible = !geometry.extended || geometry.cluster_bits >= EXTENDED_CLUSTER_BITS_MIN;
    if other.header.version < 3 || !possible {
        return Ok(None);
    }
    let quiet = monitor.quiet();
    match Survey::take(&other, Mode::Compare, &quiet) {
        Ok(survey) => Ok(Some(faults(&survey))),
        Err(Error::Limit { .. } | Error::Corrupt(_)) => Ok(None),
        Err(error) => Err(error),
    }
}
