//! After an unclean shutdown: updates the copies of the grain tables before the image is written
//! again.

use vdkit_block::{HostOffset, Result, Storage};

use crate::header::SECTOR;
use crate::sparse::Sparse;

/// Most tables that are compared on open: 2 TiB of the disk. Larger disks keep their mark until
/// they are checked.
const TABLES_MAX: usize = 65536;

/// Makes each copy equal to its table. Returns whether all are; if not, the image keeps its mark
/// for a check.
///
/// # Errors
/// I/O.
pub(crate) fn sync_copies(sparse: &Sparse, storage: &dyn Storage, len: u64) -> Result<bool> {
    let (tables, copies) = (sparse.directory.read(), sparse.redundant.read());
    if tables.len() > TABLES_MAX {
        return Ok(false);
    }
    if copies.is_empty() {
        return Ok(true);
    }
    let bytes = sparse.table_bytes() as usize;
    let (mut first, mut second) = (vec![0; bytes], vec![0; bytes]);
    let (mut whole, mut wrote) = (true, false);
    for (&table, &copy) in tables.iter().zip(copies.iter()) {
        if table == 0 || copy == 0 {
            whole &= table == copy;
            continue;
        }
        storage.read_padded(&mut first, HostOffset(u64::from(table) * SECTOR))?;
        storage.read_padded(&mut second, HostOffset(u64::from(copy) * SECTOR))?;
        if first == second {
            continue;
        }
        // A damaged table must not overwrite its copy.
        let words = first.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
        if words.into_iter().all(|word| sparse.entry(word.into(), len).is_some()) {
            storage.write_at(&first, HostOffset(u64::from(copy) * SECTOR))?;
            wrote = true;
        } else {
            whole = false;
        }
    }
    if wrote {
        storage.sync()?;
    }
    Ok(whole)
}
