//! File names in JSON, for `serialize_with`. JSON is UTF-8 and file names need not be: bytes that are not UTF-8 are
//! replaced, as where a name is printed. (serde's own way fails the whole report.)

use std::path::{Path, PathBuf};

use serde::Serializer;

/// One file.
pub fn path<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

/// A file that may be unknown.
pub fn optional<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    match path {
        Some(path) => self::path(path, serializer),
        None => serializer.serialize_none(),
    }
}

/// Several files.
pub fn paths<S: Serializer>(paths: &[PathBuf], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(paths.iter().map(|path| path.to_string_lossy()))
}
