//! External snapshot: from one request to the next, writes go to a new overlay.
//!
//! ```text
//!   clients are served │ the overlay is created, made durable, renamed into place, and opened alone
//!   clients wait       │ the old top image is flushed and closed ─► the overlay goes on top
//!   clients are served │ the old top image is read-only; its lock admits other readers
//! ```

use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use vdkit_block::{Error, IoAction, Monitor, Result, Storage};
use vdkit_chain::{BackingChoice, Disk, OpenOptions};
use vdkit_copy::{CreateOptions, NewBacking, create};
use vdkit_serve::{Export, ImageChain};
use vdkit_storage::folder_of;

use super::{LiveImages, check_writable, is_encrypted};

/// The overlay's format: the one that supports backing files here.
const FORMAT: &str = "qcow2";

/// See [`vdkit_serve::Images::snapshot_external`].
pub(super) fn snapshot_external(
    images: &LiveImages,
    export: &Export,
    path: &Path,
) -> Result<ImageChain> {
    let _job = export.begin_job("snapshot-external")?;
    check_writable(export)?;
    let (backing, guest_bytes) = {
        let disk = export.disk();
        (backing_of(&disk, path)?, disk.guest_bytes())
    };
    make(images, path, backing, guest_bytes)?;
    let done = go_on_with(images, export, path);
    if done.is_err() {
        // It was just created and is not needed.
        let _ = std::fs::remove_file(path);
    }
    done
}

/// The overlay's backing reference to the served image.
fn backing_of(disk: &Disk, overlay: &Path) -> Result<NewBacking> {
    let top = &disk.layers()[0];
    if is_encrypted(top) {
        return Err(Error::unsupported(
            disk.name(),
            "is encrypted, and the overlay would hold in plain text what the guest writes",
            "end the service, and create an encrypted overlay",
        ));
    }
    if overlay.symlink_metadata().is_ok() {
        return Err(Error::invalid_for(&overlay.display(), "is there already"));
    }
    let name = name_beside(overlay, top.path())?;
    let named = overlay.parent().unwrap_or(Path::new(".")).join(&name);
    if !is_file(&**top.format().storage(), &named) {
        return Err(Error::invalid_for(
            &top.path().display(),
            "is not the file any more that is served (it was moved or replaced), and an \
             overlay would not find it",
        ));
    }
    let Some(name) = name.to_str().map(str::to_owned) else {
        let name = name.display();
        return Err(Error::invalid_for(&name, "an overlay can name UTF-8 names only"));
    };
    // The format was given or detected: an image served for writing is never guessed.
    Ok(NewBacking::new(name, Some(top.info().format.to_owned())).open(false))
}

/// The name by which an overlay refers to an image: relative if the image is in or beneath its
/// folder, so that both can be moved together; else absolute.
fn name_beside(overlay: &Path, image: &Path) -> Result<PathBuf> {
    let real = |path: &Path| {
        folder_of(path)
            .canonicalize()
            .map_err(|source| Error::file_io(&path.display().to_string(), IoAction::Open, source))
    };
    let (Some(file), Some(_)) = (image.file_name(), overlay.file_name()) else {
        return Err(Error::invalid_for(&overlay.display(), "does not name a file"));
    };
    let (folder, target) = (real(overlay)?, real(image)?.join(file));
    let name = target.strip_prefix(&folder).unwrap_or(&target).to_owned();
    // A colon before any slash would be parsed as a protocol.
    let plain = matches!(name.components().next(), Some(Component::Normal(first))
        if !first.as_encoded_bytes().contains(&b':'));
    Ok(if plain || name.is_absolute() { name } else { Path::new(".").join(name) })
}

/// Whether a path leads to the file of a storage.
fn is_file(storage: &dyn Storage, name: &Path) -> bool {
    let Some(own) = storage.as_fd().and_then(|fd| fd.try_clone_to_owned().ok()) else {
        return false;
    };
    match (std::fs::File::from(own).metadata(), name.metadata()) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino(), a.rdev()) == (b.dev(), b.ino(), b.rdev()),
        _ => false,
    }
}

/// Creates the overlay. It gets its name when it is complete and durable.
fn make(images: &LiveImages, path: &Path, backing: NewBacking, guest_bytes: u64) -> Result<()> {
    let wanted = CreateOptions::new(path, images.registry.driver(FORMAT)?)
        .guest_bytes(guest_bytes)
        .backing(backing)
        .opening(OpenOptions::read_only().refs(images.options.refs.clone()));
    create(&images.registry, &wanted, &Monitor::default()).map(drop)
}

fn go_on_with(images: &LiveImages, export: &Export, path: &Path) -> Result<ImageChain> {
    let options = OpenOptions::read_write()
        .cache(images.options.cache)
        .limits(images.options.limits)
        .lock(images.options.lock);
    let options = options.format(FORMAT).backing(BackingChoice::Ignore);
    let overlay = Disk::open(&images.registry, path, &options)?;
    export.exchange(|served| {
        let (size, own) = (served.disk.guest_bytes(), overlay.guest_bytes());
        if size != own {
            return Err(Error::invalid_for(
                &served.disk.name(),
                format!("has {size} bytes now, and the overlay was made with {own}"),
            ));
        }
        served.disk.close()?;
        served.disk.put_on_top(overlay);
        Ok(())
    })?;
    if let Err(error) = export.disk().layers()[1].downgrade_lock() {
        tracing::warn!(
            export = export.name(),
            "the image beneath stays locked against readers: {error}"
        );
    }
    Ok(export.chain())
}
