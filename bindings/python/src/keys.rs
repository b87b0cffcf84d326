//! Options and key slots of existing images.

use std::path::PathBuf;

use pyo3::prelude::*;
use vdkit::{Secret, jobs};

use crate::disk::Opening;
use crate::jobs::{json_of, run};

#[pyfunction]
pub(crate) fn amend(
    py: Python<'_>,
    path: PathBuf,
    opening: Opening,
    options: Vec<String>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<String> {
    let report = run(py, progress, |monitor| {
        let (opening, texts) = (opening.options()?.writable(true), options.iter());
        jobs::amend(&vdkit::registry(), &path, &opening, texts.map(String::as_str), monitor)
    })?;
    Ok(json_of(&report))
}

#[pyfunction]
pub(crate) fn keys(
    py: Python<'_>,
    path: PathBuf,
    opening: Opening,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<String> {
    let report = run(py, progress, |monitor| {
        jobs::list_keys(&vdkit::registry(), &path, &opening.options()?, monitor)
    })?;
    Ok(json_of(&report))
}

#[pyfunction]
pub(crate) fn key_add(
    py: Python<'_>,
    path: PathBuf,
    opening: Opening,
    key: Vec<u8>,
    milliseconds: u64,
    replace: bool,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<String> {
    let (key, add) = (Secret::new(key), if replace { jobs::change_key } else { jobs::add_key });
    let report = run(py, progress, |monitor| {
        add(&vdkit::registry(), &path, &opening.options()?, &key, None, milliseconds, monitor)
    })?;
    Ok(json_of(&report))
}

#[pyfunction]
pub(crate) fn key_remove(
    py: Python<'_>,
    path: PathBuf,
    opening: Opening,
    slot: u32,
    force: bool,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<String> {
    let report = run(py, progress, |monitor| {
        jobs::remove_key(&vdkit::registry(), &path, &opening.options()?, slot, force, monitor)
    })?;
    Ok(json_of(&report))
}
