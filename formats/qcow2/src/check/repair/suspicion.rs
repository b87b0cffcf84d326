//! Whether to trust the header before anything is mended by it.
//!
//! One flipped bit there (another kind of L2 entries, a data file) makes a sound mapping look like
//! nonsense, or half of its clusters like leaks. To mend that would destroy it.

use vdkit_block::{Error, Monitor, NoProgress, Result};

use crate::check::image::Image;
use crate::check::survey::{Mode, Survey};
use crate::header::field;
use crate::layout::{EXTENDED_CLUSTER_BITS_MIN, incompatible};

/// Faults below which no doubt arises.
const FAULTS_MIN: u64 = 8;
/// How many times fewer faults another reading must find to be believed.
const FEWER: u64 = 8;

/// [`Error::Corrupt`] where the header is more likely wrong than what it leads to.
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
            // The name vouches for the bit, and so does each entry that is at its guest offset.
            // What a writer had reserved ahead before a crash looks like leaks, which go away where
            // entries of the data file happen to name them.
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
    // One table may be none at all; most of them are not.
    let nonsense = survey.tables.iter().filter(|table| table.nonsense * 2 > table.used).count();
    if nonsense > 1 && nonsense * 2 > survey.tables.len() {
        return refuse(
            image,
            &format!(
                "a header under which {nonsense} of {} L2 tables make no sense",
                survey.tables.len()
            ),
            "one that fits the mapping",
        );
    }
    Ok(())
}

fn refuse(image: &Image, found: &str, expected: &str) -> Result<()> {
    let expected = format!("{expected} (nothing was changed)");
    Err(Error::corrupt(image.name(), field::INCOMPATIBLE, "header", found, expected))
}

fn faults(survey: &Survey) -> u64 {
    survey.findings.report.corruptions + survey.findings.report.leaks
}

/// The number of faults if a feature bit had its other value; nothing where it cannot have.
fn other_reading(image: &Image, bit: u64, monitor: &Monitor<'_>) -> Result<Option<u64>> {
    let mut other = image.clone();
    other.header.incompatible ^= bit;
    let geometry = &mut other.header.geometry;
    geometry.extended = other.header.incompatible & incompatible::EXTENDED_L2 != 0;
    let possible = !geometry.extended || geometry.cluster_bits >= EXTENDED_CLUSTER_BITS_MIN;
    if other.header.version < 3 || !possible {
        return Ok(None);
    }
    let quiet = Monitor { cancel: monitor.cancel.clone(), progress: &NoProgress };
    match Survey::take(&other, Mode::Compare, &quiet) {
        Ok(survey) => Ok(Some(faults(&survey))),
        Err(Error::Limit { .. } | Error::Corrupt(_)) => Ok(None),
        Err(error) => Err(error),
    }
}
