//! Findings on the backing chain.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use vdkit_block::{BackingRef, Error};
use vdkit_chain::ChainLink;

use crate::{DoctorCode, Examination, command, word_of};
use vdkit_tree::target_of;

/// Chain length from which on a finding is reported.
const DEPTH_REMARKABLE: usize = 16;

impl Examination<'_> {
    pub(super) fn examine_chain(&mut self) {
        let Some(backing) = self.link().info.backing() else { return };
        if backing.format.is_none() {
            self.name_format(&backing);
        }
        match self.broken.take() {
            Some(error) => self.examine_break(&backing, &error),
            None => self.examine_base(&backing),
        }
        if self.links.len() > DEPTH_REMARKABLE {
            let message = format!("{} images in one chain", self.links.len());
            let mend = self.links.last().and_then(|lowest| {
                let name = self.name_of(lowest)?;
                let format = lowest.info.format;
                self.vdkit(&["rebase", "--backing", &name, "--backing-format", format], &[])
            });
            self.add(DoctorCode::DeepChain, message, mend);
        }
    }

    /// The command that changes only the backing reference in the header.
    fn rename(&self, name: &str, format: &str) -> Option<Vec<String>> {
        self.vdkit(&["rebase", "--unsafe", "--backing", name, "--backing-format", format], &[])
    }

    fn name_format(&mut self, backing: &BackingRef) {
        let found = self.links.get(1).map(|link| link.info.format);
        let message = match found {
            Some("raw") => format!(
                "the format of '{}' is not named; it has no header that is known, so it is raw if \
                 it was meant to be",
                backing.name
            ),
            Some(format) => {
                format!("the format of '{}' is not named; it is probed as {format}", backing.name)
            }
            None => format!("the format of '{}' is not named", backing.name),
        };
        let mend = self.rename(&backing.name, found.unwrap_or("FORMAT"));
        self.add(DoctorCode::BackingFormat, message, mend);
    }

    /// Reports a broken chain. The last link holds the broken reference.
    fn examine_break(&mut self, backing: &BackingRef, error: &Error) {
        let own = self.links.len() == 1;
        let format = backing.format.as_deref().unwrap_or("FORMAT");
        match error {
            Error::Refused(_) => {
                let mend = own.then(|| self.allow(backing)).flatten();
                self.add(DoctorCode::BackingRefused, error.to_string(), mend);
            }
            Error::Reference { source, .. } | Error::File { source, .. }
                if source.kind() == std::io::ErrorKind::NotFound =>
            {
                let mend = own.then(|| self.rename("NEW", format)).flatten();
                self.add(DoctorCode::BackingMissing, error.to_string(), mend);
            }
            _ => self.add(DoctorCode::BackingBroken, error.to_string(), None),
        }
    }

    /// The command that allows a file in another folder.
    fn allow(&self, backing: &BackingRef) -> Option<Vec<String>> {
        let target = target_of(&absolute(self.path)?, &backing.name)?;
        let folder = target.parent()?.display().to_string();
        self.vdkit(&["doctor", "--allow-ref", &folder], &[])
    }

    /// Examines the direct backing image.
    fn examine_base(&mut self, backing: &BackingRef) {
        let Some(base) = self.links.get(1).cloned() else { return };
        let word = word_of(&base.path);
        if Path::new(&backing.name).is_absolute()
            && let Some(name) = self.relative(&base)
        {
            let mend = self.rename(&name, backing.format.as_deref().unwrap_or(base.info.format));
            self.add(DoctorCode::BackingAbsolute, format!("'{}'", backing.name), mend);
        }
        let (Ok(below), Ok(own)) = (fs::metadata(&base.path), fs::metadata(self.path)) else {
            return;
        };
        if below.is_file() && below.permissions().mode() & 0o222 != 0 {
            let mend = command(&["chmod", "a-w", &word]);
            self.add(DoctorCode::BackingWritable, format!("{word} may be written"), mend);
        }
        // Not every file system records creation times.
        if let (Ok(written), Ok(made)) = (below.modified(), own.created())
            && let Ok(later) = written.duration_since(made)
            && !later.is_zero()
        {
            let message = format!(
                "{word} was written {} s after this image was made; a change of its metadata \
                 alone, or a copy of this image, looks the same",
                later.as_secs()
            );
            self.add(DoctorCode::BackingNewer, message, None);
        }
    }

    /// A path to store in this image's header for another image.
    fn name_of(&self, other: &ChainLink) -> Option<String> {
        self.relative(other).or_else(|| absolute(&other.path)?.to_str().map(str::to_owned))
    }

    /// The base's path relative to the image's folder, if it is beneath it.
    fn relative(&self, base: &ChainLink) -> Option<String> {
        let image = absolute(self.path)?;
        let base = absolute(&base.path)?;
        base.strip_prefix(image.parent()?).ok()?.to_str().map(str::to_owned)
    }
}

fn absolute(path: &Path) -> Option<PathBuf> {
    path.canonicalize().ok()
}
