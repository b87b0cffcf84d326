//! Changes fields of the descriptor in place.

use vdkit_block::{AmendRequest, Amendment, Error, HostOffset, Monitor, Result};

use crate::create::identity;
use crate::descriptor::{Descriptor, ExtentType, NO_PARENT};
use crate::driver::VmdkDriver;
use crate::header::SECTOR;
use crate::options::{ADAPTER_TYPE, HWVERSION, SPECS, SUBFORMAT, TOOLSVERSION};
use crate::rewrite;
use crate::source::{Placed, Source};

impl Amendment for VmdkDriver {
    fn amends_backing(&self) -> bool {
        true
    }

    fn amend(&self, request: &AmendRequest, _monitor: &Monitor<'_>) -> Result<Vec<String>> {
        let storage = &request.storage;
        let file = storage.name();
        let source = Source::read(storage, &request.limits)?;
        let Some(placed) = source.placed else {
            return Err(Error::unsupported(
                file,
                "not supported: changing fields of an extent without a descriptor",
                "name the disk's descriptor instead of one of its extents",
            ));
        };
        refuse_others(request, &placed.descriptor)?;
        let mut descriptor = placed.descriptor.clone();
        let mut changed = Vec::new();
        for (key, field) in [
            (ADAPTER_TYPE, "ddb.adapterType"),
            (HWVERSION, "ddb.virtualHWVersion"),
            (TOOLSVERSION, "ddb.toolsVersion"),
        ] {
            if let Some(value) = request.options.text(key)
                && descriptor.field(field) != Some(value)
            {
                set(&mut descriptor, field, Some(value), file)?;
                changed.push(key.to_owned());
            }
        }
        if let Some(backing) = &request.backing {
            let (name, cid) = match backing {
                None => (None, NO_PARENT),
                Some(backing) => {
                    let flat = |kind| matches!(kind, ExtentType::Flat | ExtentType::Zero);
                    if descriptor.extents.iter().all(|e| flat(e.kind))
                        && !descriptor.extents.is_empty()
                    {
                        return Err(Error::unsupported(
                            file,
                            "not supported: a parent of a disk whose extents have no holes",
                            "convert it to monolithicSparse",
                        ));
                    }
                    (Some(backing.name.as_str()), identity(file, backing)?)
                }
            };
            if (descriptor.parent(), descriptor.parent_cid) != (name, cid) {
                set(&mut descriptor, "parentCID", Some(&format!("{cid:08x}")), file)?;
                set(&mut descriptor, "parentFileNameHint", name, file)?;
                changed.push("backing_file".to_owned());
            }
        }
        if !changed.is_empty() {
            write(request, &placed, descriptor.text())?;
        }
        Ok(changed)
    }
}

/// Rejects options that are fixed at creation.
fn refuse_others(request: &AmendRequest, descriptor: &Descriptor) -> Result<()> {
    for spec in SPECS {
        let Some(value) = request.options.text(spec.key) else { continue };
        let same = spec.key == SUBFORMAT && descriptor.create_type == value;
        if same || [ADAPTER_TYPE, HWVERSION, TOOLSVERSION].contains(&spec.key) {
            continue;
        }
        return Err(Error::unsupported(
            request.storage.name(),
            format!("not supported: changing {} of a VMDK image in place", spec.key),
            "convert it to a new image that has it",
        ));
    }
    Ok(())
}

fn set(descriptor: &mut Descriptor, field: &str, value: Option<&str>, file: &str) -> Result<()> {
    let text = descriptor.with_field(field, value);
    *descriptor = Descriptor::parse(text.as_bytes(), 0, file)?;
    Ok(())
}

/// Overwrites the old text with the new one; a power cut leaves one of the two.
fn write(request: &AmendRequest, placed: &Placed, text: &str) -> Result<()> {
    let storage = &request.storage;
    let hint = "convert it to a new image";
    if let Some(room) = placed.room.filter(|room| text.len() as u64 > *room) {
        let what = format!("a descriptor of {} bytes in {room} that are kept for it", text.len());
        return Err(Error::unsupported(storage.name(), what, hint));
    }
    let old = placed.descriptor.text();
    let Some(all) = rewrite::rewrites(old, text, placed.room) else {
        let what = "not supported: a change of several sectors of the descriptor, which a power cut could tear";
        return Err(Error::unsupported(storage.name(), what, hint));
    };
    let mut len = old.len();
    for rewrite in &all {
        let text = rewrite.text.as_bytes();
        let mut whole = len.max(text.len());
        if let Some(room) = placed.room {
            // Old bytes after the text must not appear as part of it.
            whole = whole.next_multiple_of(SECTOR as usize).min(room as usize);
        }
        if placed.room.is_none() && storage.len()? < whole as u64 {
            // A zero byte ends the text, so the longer file exposes no unwritten part.
            storage.set_len(whole as u64)?;
            storage.sync()?;
        }
        let mut bytes = text.to_vec();
        bytes.resize(whole, 0);
        for step in &rewrite.steps {
            let part = step.start..step.end.min(whole);
            storage.write_at(&bytes[part.clone()], HostOffset(placed.at + part.start as u64))?;
            storage.sync()?;
        }
        len = text.len();
    }
    if placed.room.is_none() && storage.len()? > len as u64 {
        storage.set_len(len as u64)?;
    }
    storage.sync()
}
