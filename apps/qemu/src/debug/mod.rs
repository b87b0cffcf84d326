//! `blkdebug:` and `blkverify:` names: storages that fail by rules, and that compare reads.
//!
//! | module | content |
//! |---|---|
//! | `rules` | rules files, properties, the state machine of rules |
//! | `areas` | what a byte of an image holds, from which QEMU's events follow |
//! | `faulty` | the storage that fails by rules |
//! | `verify` | the storage that compares |

mod areas;
mod faulty;
mod rules;
mod verify;

use std::path::PathBuf;
use std::sync::Arc;

use vdkit::storage::{FileOptions, LockMode};
use vdkit::{CacheMode, Result, Storage};

use crate::names::{Flat, Image};
use crate::open::registry;
use faulty::Faulty;
pub use rules::Rules;
use verify::Verify;
pub use verify::mismatched;

/// An image behind a storage of this module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Debug {
    /// `blkdebug`: the image, and when requests to it fail.
    Faulty { image: Box<Image>, rules: Rules },
    /// `blkverify`: the raw copy, and the image whose disk is compared with it.
    Verify { raw: Box<Image>, test: Box<Image> },
}

impl Debug {
    /// QEMU's name of the driver.
    pub fn driver(&self) -> &'static str {
        match self {
            Self::Faulty { .. } => "blkdebug",
            Self::Verify { .. } => "blkverify",
        }
    }

    /// The images beneath.
    pub fn images(&self) -> Vec<&Image> {
        match self {
            Self::Faulty { image, .. } => vec![&**image],
            Self::Verify { raw, test } => vec![&**raw, &**test],
        }
    }

    /// As [`Debug::images`], to change them.
    pub fn images_mut(&mut self) -> Vec<&mut Image> {
        match self {
            Self::Faulty { image, .. } => vec![&mut **image],
            Self::Verify { raw, test } => vec![&mut **raw, &mut **test],
        }
    }

    /// The files beneath, by QEMU's names of the children. (The image that is verified is no plain
    /// file.)
    pub fn files(&self) -> Vec<(&'static str, PathBuf)> {
        let (name, image) = match self {
            Self::Faulty { image, .. } => ("image", image),
            Self::Verify { raw, .. } => ("raw", raw),
        };
        image.path().map(|path| (name, path.to_owned())).into_iter().collect()
    }

    /// Opens the storage. `name` is the user's, and `format` the one that the user named for the
    /// content.
    pub fn open(
        &self,
        name: &str,
        format: Option<&str>,
        writable: bool,
        cache: CacheMode,
    ) -> Result<Arc<dyn Storage>> {
        let storage = |image: &Image| {
            let locks = image.locks(false);
            let lock = if locks { LockMode::Auto } else { LockMode::Off };
            let options = FileOptions::default().writable(writable).cache(cache).lock(lock);
            registry().open_storage(&image.opened(locks), &options)
        };
        match self {
            Self::Faulty { image, rules } => {
                Ok(Arc::new(Faulty::new(name, storage(image)?, rules.clone(), format)))
            }
            Self::Verify { raw, test } => {
                Ok(Arc::new(Verify::open(name, storage(raw)?, test, writable, cache)?))
            }
        }
    }
}

/// `RULES:IMAGE` after `blkdebug:`; the rules' file may be left out.
///
/// # Errors
/// QEMU's words after `Could not open 'NAME': `.
pub fn parse_faulty(rest: &str) -> std::result::Result<Debug, String> {
    let (file, image) =
        rest.split_once(':').ok_or("blkdebug requires both config file and image path")?;
    let rules = Rules::read((!file.is_empty()).then_some(file))?;
    Ok(Debug::Faulty { image: Box::new(crate::names::parse(image)?), rules })
}

/// `RAW:IMAGE` after `blkverify:`.
pub fn parse_verify(rest: &str) -> std::result::Result<Debug, String> {
    let (raw, test) =
        rest.split_once(':').ok_or("blkverify requires raw copy and original image path")?;
    let (raw, test) = (crate::names::parse(raw)?, crate::names::parse(test)?);
    Ok(Debug::Verify { raw: Box::new(raw), test: Box::new(test) })
}

/// Options of `blkdebug` that change the size of QEMU's requests, and nothing of vdkit's.
const LIMITS: &[&str] = &[
    "max-transfer",
    "opt-write-zero",
    "max-write-zero",
    "opt-discard",
    "max-discard",
    "take-child-perms",
    "unshare-child-perms",
];

/// The properties of a `blkdebug` node without its image; what is not known is left.
pub fn faulty_properties(flat: &mut Flat, image: Image) -> std::result::Result<Debug, String> {
    let mut rules = Rules::read(flat.take("config").as_deref())?;
    rules.add_properties(flat)?;
    let align = flat.take("align");
    if let Some(align) = align.filter(|align| !align.parse::<u64>().is_ok_and(fits)) {
        return Err(format!("Cannot meet constraints with align {align}"));
    }
    for key in LIMITS {
        flat.take(key);
        flat.take_below(key);
    }
    Ok(Debug::Faulty { image: Box::new(image), rules })
}

/// An alignment that QEMU takes; 0 is none.
fn fits(align: u64) -> bool {
    align == 0 || align.is_power_of_two() && align < 1 << 31
}
