//! Unique IDs in the headers of images.

use uuid::{Builder, Uuid};

use crate::error::{Error, Result};

/// A random UUID (RFC 9562, version 4).
///
/// # Errors
/// [`Error::Invalid`] if the system has no random numbers.
pub fn random_uuid() -> Result<Uuid> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::invalid(format!("no random numbers: {error}")))?;
    Ok(Builder::from_random_bytes(bytes).into_uuid())
}
