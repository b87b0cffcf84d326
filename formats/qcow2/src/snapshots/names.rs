//! Finds snapshots by id or name, and assigns new ids.

use vdkit_block::{Error, Result};

use super::Snapshot;

/// Longest name in bytes that QEMU's programs can handle.
const NAME_BYTES_MAX: usize = 255;
/// Most snapshots that an error names.
const NAMED_MAX: usize = 8;

/// What to compare first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum First {
    /// Ids, then names: as `qemu-img snapshot -a` and `qemu-img convert -l`.
    Id,
    /// Names, then ids: as `qemu-img snapshot -d`, which accepts only names.
    Name,
}

/// The index of the snapshot with id or name `which`.
pub(super) fn find(file: &str, snapshots: &[Snapshot], which: &str, first: First) -> Result<usize> {
    let id = || snapshots.iter().position(|s| s.id == which.as_bytes());
    let name = || snapshots.iter().position(|s| s.name == which.as_bytes());
    let found = match first {
        First::Id => id().or_else(name),
        First::Name => name().or_else(id),
    };
    found.ok_or_else(|| {
        let mut known: Vec<String> = snapshots
            .iter()
            .take(NAMED_MAX)
            .map(|s| {
                let (id, name) = (String::from_utf8_lossy(&s.id), String::from_utf8_lossy(&s.name));
                format!("{id} ({name})")
            })
            .collect();
        if snapshots.len() > NAMED_MAX {
            known.push(format!("{} more", snapshots.len() - NAMED_MAX));
        }
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        Error::invalid_for(
            &file,
            format!("no snapshot has the id or name '{which}'; there are: {known}"),
        )
    })
}

pub(super) fn check(name: &str) -> Result<()> {
    if name.len() > NAME_BYTES_MAX || name.contains('\0') {
        return Err(Error::invalid(format!(
            "a snapshot's name has at most {NAME_BYTES_MAX} bytes and no zero byte; this one has {}",
            name.len()
        )));
    }
    Ok(())
}

/// The id of a new snapshot: one more than the largest numeric id, as in QEMU.
pub(super) fn new_id(file: &str, snapshots: &[Snapshot]) -> Result<Vec<u8>> {
    let largest = snapshots.iter().map(|s| leading_number(&s.id)).max().unwrap_or(0);
    let next = largest.checked_add(1).ok_or_else(|| {
        Error::invalid_for(&file, "a snapshot has the largest id there is; delete it first")
    })?;
    Ok(next.to_string().into_bytes())
}

/// The number at the start of a text, saturating.
fn leading_number(text: &[u8]) -> u64 {
    let digits = text.iter().take_while(|b| b.is_ascii_digit());
    digits.fold(0u64, |sum, b| sum.saturating_mul(10).saturating_add(u64::from(b - b'0')))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(id: &str, name: &str) -> Snapshot {
        Snapshot { id: id.into(), name: name.into(), ..Snapshot::default() }
    }

    #[test]
    fn ids_and_names_are_found_in_the_order_of_qemu() {
        let list = [snapshot("1", "2"), snapshot("2", "same"), snapshot("3", "same")];
        let found = |which, first| find("f", &list, which, first).ok();
        assert_eq!(found("2", First::Id), Some(1));
        assert_eq!(found("2", First::Name), Some(0));
        assert_eq!(found("same", First::Id), Some(1));
        assert_eq!(found("3", First::Name), Some(2));
        let error = find("f", &list, "x", First::Id).unwrap_err().to_string();
        assert!(error.contains("'x'") && error.contains("2 (same)"), "{error}");
    }

    #[test]
    fn new_ids_are_above_all_others() {
        let id = |list: &[Snapshot]| new_id("f", list).map(|id| String::from_utf8(id).unwrap());
        assert_eq!(id(&[]).unwrap(), "1");
        assert_eq!(
            id(&[snapshot("7", ""), snapshot("12x", ""), snapshot("a9", "")]).unwrap(),
            "13"
        );
        assert!(id(&[snapshot("99999999999999999999999", "")]).is_err());
    }

    #[test]
    fn names_that_nobody_could_type_are_refused() {
        assert!(check("a name").is_ok() && check(&"x".repeat(255)).is_ok());
        for name in ["a\0b", &"x".repeat(256)] {
            assert!(check(name).is_err(), "{name:?}");
        }
    }
}
