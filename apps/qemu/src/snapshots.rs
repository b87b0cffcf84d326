//! The internal snapshot that an option names.

use std::path::Path;

use vdkit::{BackingChoice, OpenOptions, SnapshotInfo, describe_chain};

use crate::failure::Failure;
use crate::names::Flat;
use crate::open::registry;

/// An internal snapshot, as QEMU finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotChoice {
    /// This is its id or, if no snapshot has that, its name.
    Either(String),
    /// `snapshot.id=…,snapshot.name=…`: what is given must fit.
    Keys { id: Option<String>, name: Option<String> },
}

impl SnapshotChoice {
    /// Parses the value of an option of `program`.
    pub fn parse(text: &str, program: &str) -> Result<Self, Failure> {
        if !text.starts_with("snapshot.") {
            return Ok(Self::Either(text.to_owned()));
        }
        let mut flat = Flat::from_keys(text, None).map_err(Failure::new)?;
        let (id, name) = (flat.take("snapshot.id"), flat.take("snapshot.name"));
        match flat.first_key() {
            None => Ok(Self::Keys { id, name }),
            Some(key) => Err(Failure::new(format!(
                "Invalid parameter '{key}'\n{program}: Failed in parsing snapshot param '{text}'"
            ))),
        }
    }

    /// The id of the snapshot among those of an image.
    pub fn find(&self, all: &[SnapshotInfo]) -> Result<String, Failure> {
        let found = match self {
            Self::Either(text) => {
                all.iter().find(|one| one.id == *text).or(all.iter().find(|one| one.name == *text))
            }
            Self::Keys { id: None, name: None } => None,
            Self::Keys { id, name } => all.iter().find(|one| {
                id.as_ref().is_none_or(|id| one.id == *id)
                    && name.as_ref().is_none_or(|name| one.name == *name)
            }),
        };
        let lacking = || Failure::new("Failed to load snapshot: Can't find snapshot");
        found.map(|one| one.id.clone()).ok_or_else(lacking)
    }

    /// The id of the snapshot in the image of this path. Of an image that cannot be described, what
    /// was asked for: opening it tells why.
    pub fn find_in(&self, path: Option<&Path>, options: &OpenOptions) -> Result<String, Failure> {
        let alone = options.clone().snapshot(None).backing(BackingChoice::Ignore);
        let described = path.and_then(|path| describe_chain(&registry(), path, &alone).ok());
        match described.as_ref().and_then(|report| report.links.first()) {
            Some(link) => self.find(&link.info.snapshots),
            None => Ok(self.text().to_owned()),
        }
    }

    fn text(&self) -> &str {
        match self {
            Self::Either(text) => text,
            Self::Keys { id, name } => id.as_ref().or(name.as_ref()).map_or("", String::as_str),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_names_are_told_apart() {
        let one = |id: &str, name: &str| SnapshotInfo {
            id: id.to_owned(),
            name: name.to_owned(),
            ..SnapshotInfo::default()
        };
        let all = [one("1", "2"), one("2", "1"), one("3", "three")];
        for (text, id) in [
            ("1", Some("1")),
            ("three", Some("3")),
            ("snapshot.name=1", Some("2")),
            ("snapshot.id=1", Some("1")),
            ("snapshot.id=2,snapshot.name=1", Some("2")),
            ("snapshot.id=1,snapshot.name=1", None),
            ("snapshot.name=3", None),
            ("four", None),
        ] {
            let found = SnapshotChoice::parse(text, "qemu-img").unwrap().find(&all);
            assert_eq!(found.ok().as_deref(), id, "{text}");
        }
        assert!(SnapshotChoice::parse("snapshot.nam=1", "qemu-img").is_err());
    }
}
