//! New images.

use std::path::{Path, PathBuf};

use pyo3::prelude::*;
use vdkit::jobs::{self, Backing, CreateOptions, NewBacking};
use vdkit::{BackingRef, Error, FormatDriver, Options, Result, Secret};

use crate::disk::Opening;
use crate::jobs::run;
use crate::number::Number;

/// What a new image shall be, beside its format and size, as Python passes it.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Wanted {
    options: Vec<String>,
    key: Option<Vec<u8>>,
    backing: Option<String>,
    backing_format: Option<String>,
    /// How the backing image is opened.
    opening: Opening,
}

impl Wanted {
    fn key(&self) -> Option<Secret> {
        self.key.clone().map(Secret::new)
    }

    fn backing(&self) -> Option<NewBacking> {
        let name = self.backing.as_deref()?;
        Some(NewBacking::new(name, self.backing_format.clone()))
    }

    /// The options of the format, with the key.
    pub(crate) fn of_format(&self, driver: &dyn FormatDriver) -> Result<Options> {
        let mut options = format_options(driver, &self.options)?;
        if self.key.is_some() && !driver.encrypts(&options) {
            let why = format!("a {} image with these options has no key", driver.name());
            return Err(Error::invalid(why));
        }
        options.set_key(self.key());
        Ok(options)
    }

    /// The image that a converted one at `path` stands on.
    pub(crate) fn backing_of(&self, path: &Path) -> Result<Option<(BackingRef, Backing)>> {
        let Some(backing) = self.backing() else { return Ok(None) };
        let opening = self.opening.options()?;
        let found = backing.find(&vdkit::registry(), path, &opening)?;
        let opening = opening.of_other(found.reference.format.clone());
        Ok(Some((found.reference, Backing::new(found.path, opening))))
    }

    /// The key alone, for an image that exists.
    pub(crate) fn only_key(&self) -> Result<Option<Secret>> {
        if self.options.is_empty() && self.backing.is_none() {
            Ok(self.key())
        } else {
            Err(Error::invalid("an image that exists keeps its options and its backing image"))
        }
    }
}

pub(crate) fn format_options(driver: &dyn FormatDriver, options: &[String]) -> Result<Options> {
    Options::parse(driver.name(), driver.options(), options.iter().map(String::as_str))
}

#[pyfunction]
pub(crate) fn create(
    py: Python<'_>,
    path: PathBuf,
    format: &str,
    size: Option<Number<u64>>,
    wanted: Wanted,
    replace: bool,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<u64> {
    run(py, progress, |monitor| {
        let driver = vdkit::format(format)?;
        let image = CreateOptions::new(&path, driver)
            .guest_bytes(size.as_ref().map(|size| size.0))
            .options(wanted.of_format(driver)?)
            .backing(wanted.backing())
            .opening(wanted.opening.options()?)
            .replace(replace);
        jobs::create(&vdkit::registry(), &image, monitor)
    })
    .map(|made| made.guest_bytes)
}
