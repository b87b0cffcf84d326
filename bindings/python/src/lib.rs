//! The part of the Python package `vdkit` that is compiled: disks and jobs with plain arguments and
//! JSON reports. `python/vdkit` makes dataclasses, file objects and context managers of them.
//!
//! The interpreter's lock is released around everything that may wait.

mod disk;
mod errors;
mod jobs;
mod memory;
mod source;

use pyo3::prelude::*;

#[pymodule]
mod _vdkit {
    #[pymodule_export]
    use super::disk::Disk;
    #[pymodule_export]
    use super::jobs::{
        Server, check, commit, compare, convert, create, describe, formats, inspect, measure,
        rebase, serve,
    };
    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
