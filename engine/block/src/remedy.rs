//! What can be done about an error, without the words of any one program.

use std::fmt;
use std::path::PathBuf;

use crate::driver::Repair;

/// What the user can do about an error. `Display` gives words that hold in every program; a
/// program with commands of its own words the variants as those.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remedy {
    /// Advice without a command.
    Advice(String),
    /// Check the image, which reports all damage.
    Check,
    /// Check the image as one of this format, or name raw if it is a raw disk.
    CheckAs {
        /// The format's name.
        format: String,
    },
    /// Repair the image.
    Repair {
        /// What to repair.
        repair: Repair,
        /// Free also space that may hold data to which the references are damaged.
        force: bool,
    },
    /// Give the key of the image.
    GiveKey,
    /// Give a key for the new image.
    GiveNewKey,
    /// Follow the references in images.
    FollowReferences,
    /// Allow references to files in this folder.
    AllowFolder(PathBuf),
    /// Give the parent's file, since the image has no place for its name.
    GiveParent,
    /// Store another backing reference in the overlay, without comparing data.
    StoreReference {
        /// The overlay.
        overlay: String,
        /// The backing file, if it is known.
        backing: Option<String>,
        /// Its format, if that is what is wrong.
        format: Option<String>,
    },
    /// Convert the image to a new one.
    Convert {
        /// The image.
        file: String,
        /// The format of the new image and its options, as `key=value`.
        target: Option<(&'static str, String)>,
        /// The new image needs a key.
        new_key: bool,
    },
    /// Put the key in a slot whose derivation takes this time.
    ChangeKey {
        /// The image.
        file: String,
        /// The time in milliseconds, as the user gave it.
        milliseconds: String,
    },
    /// Create an overlay over the image, and write to that.
    Overlay,
    /// Do something else, or repeat it by force.
    Force {
        /// What to do instead.
        instead: Box<Self>,
        /// When force does no harm, to follow "if".
        when: &'static str,
    },
    /// Let the overlays stand alone, so that none needs the image.
    StandAlone {
        /// The first overlay.
        overlay: String,
    },
    /// Give the key of another slot.
    GiveOtherKey,
    /// Name the format of the backing image.
    NameBackingFormat {
        /// The format, if it can only be this one.
        format: Option<&'static str>,
    },
    /// Name the format, as the bytes of the disk look like those of another.
    NameFormat {
        /// What the disk looks like.
        format: &'static str,
    },
    /// Create an empty disk.
    Create {
        /// Its bytes, if known.
        bytes: Option<u64>,
    },
    /// Resize the disk.
    Resize {
        /// The image.
        file: String,
        /// The bytes that it needs.
        bytes: u64,
        /// That is fewer than it has.
        shrink: bool,
    },
    /// Remove a dirty bitmap.
    RemoveBitmap {
        /// The image.
        file: String,
        /// The bitmap's name.
        name: String,
    },
    /// Take the disks out of the appliance, or name the format raw if the file itself is the disk.
    ExtractDisks,
}

impl Remedy {
    /// Repair everything.
    pub const REPAIR: Self = Self::Repair { repair: Repair::All, force: false };

    /// [`Remedy::Force`], for an error.
    pub fn forced(when: &'static str, instead: impl Into<Self>) -> Box<Self> {
        Box::new(Self::Force { instead: Box::new(instead.into()), when })
    }
}

impl From<String> for Remedy {
    fn from(advice: String) -> Self {
        Self::Advice(advice)
    }
}

impl From<&str> for Remedy {
    fn from(advice: &str) -> Self {
        Self::Advice(advice.to_owned())
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Advice(text) => f.write_str(text),
            Self::Check => f.write_str("check the image"),
            Self::CheckAs { format } => {
                write!(f, "check it as {format}; if it is a raw disk, name that format")
            }
            Self::Repair { force: true, .. } => f.write_str("repair the image by force"),
            Self::Repair { .. } => f.write_str("repair the image"),
            Self::GiveKey => f.write_str("give its key"),
            Self::GiveNewKey => f.write_str("give a key for it"),
            Self::FollowReferences => f.write_str("allow references"),
            Self::AllowFolder(folder) => {
                write!(f, "if you trust the image, allow references to {}", folder.display())
            }
            Self::GiveParent => f.write_str("give the parent's file"),
            Self::StoreReference { overlay, backing, format } => {
                write!(f, "store the right reference in {overlay}")?;
                backing.iter().try_for_each(|backing| write!(f, ": {backing}"))?;
                format.iter().try_for_each(|format| write!(f, ", format {format}"))
            }
            Self::Convert { target: Some((format, options)), .. } => {
                write!(f, "convert it to a new {format} image with {options}")
            }
            Self::Convert { .. } => f.write_str("convert it to a new image"),
            Self::ChangeKey { .. } => f.write_str("put the key in a new slot"),
            Self::Overlay => f.write_str("create an overlay and write to that"),
            Self::Force { instead, when } => write!(f, "{instead}; if {when}, force it"),
            Self::StandAlone { .. } => {
                f.write_str("use an overlay of its own instead, or first make them independent")
            }
            Self::GiveOtherKey => f.write_str("give the key of another slot"),
            Self::NameBackingFormat { format: None } => f.write_str("name its format"),
            Self::NameBackingFormat { format: Some(format) } => {
                write!(f, "if it is {format}, name that format")
            }
            Self::NameFormat { format } => {
                write!(f, "name the format: {format}, or raw if it is a raw disk")
            }
            Self::Create { bytes: Some(bytes) } => {
                write!(f, "create an empty disk of {bytes} bytes")
            }
            Self::Create { bytes: None } => f.write_str("create an empty disk"),
            Self::Resize { bytes, shrink: false, .. } => {
                write!(f, "grow it to {bytes} bytes first")
            }
            Self::Resize { bytes, shrink: true, .. } => write!(f, "shrink it to {bytes} bytes"),
            Self::RemoveBitmap { .. } => f.write_str("remove it first"),
            Self::ExtractDisks => f.write_str(
                "take its disks out; if the file itself is the disk, name the format raw",
            ),
        }
    }
}
