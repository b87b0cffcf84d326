//! How many files a process may have open.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Lets the calling process open as many files as its hard limit allows: the soft limit, often 1024, is
/// that of programs that use select(2). For programs that serve; a library does not change it unasked.
pub fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::debug!("the limit of open files stays: {error}");
    }
}
