//! The part of the Python package `vdkit` that is compiled: disks and jobs with plain arguments and
//! JSON reports. `python/vdkit` makes dataclasses, file objects and context managers of them.
//!
//! The interpreter's lock is released around everything that may wait.

mod creation;
mod disk;
mod errors;
mod jobs;
mod keys;
mod memory;
mod number;
mod server;
mod source;

use pyo3::prelude::*;

#[pymodule]
mod _vdkit {
    #[pymodule_export]
    use super::creation::create;
    #[pymodule_export]
    use super::disk::Disk;
    #[pymodule_export]
    use super::jobs::{
        check, commit, compact, compare, convert, describe, formats, inspect, measure, rebase,
    };
    #[pymodule_export]
    use super::keys::{amend, key_add, key_remove, keys};
    #[pymodule_export]
    use super::server::{Server, serve, serve_vhost_user};
    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
