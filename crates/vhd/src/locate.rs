//! Finding the footer of an image, and its copy.

use vdkit_block::{Error, HostOffset, Result, Storage};

use crate::footer::{DiskType, FOOTER_BYTES, Footer, NoFooter};

/// The footers of a file, as they are.
#[derive(Debug)]
pub(crate) struct Footers {
    /// At the start; fixed images have none.
    pub(crate) front: std::result::Result<Footer, NoFooter>,
    /// At the end.
    pub(crate) back: std::result::Result<Footer, NoFooter>,
    /// Where the one at the end is: its last byte is missing in images of Virtual PC before 2004.
    pub(crate) back_at: u64,
}

impl Footers {
    /// Reads both, in two reads.
    ///
    /// # Errors
    /// Those of the storage.
    pub(crate) fn read(storage: &dyn Storage) -> Result<Self> {
        let mut bytes = [0; FOOTER_BYTES];
        let got = storage.read_up_to(&mut bytes, HostOffset(0))?;
        let mut front = Footer::parse(&bytes[..got]);
        if front.as_ref().is_ok_and(|footer| footer.disk_type == DiskType::Fixed) {
            // The guest's own bytes.
            front = Err(NoFooter { at: 0, found: "a fixed disk's".to_owned(), expected: "a copy" });
        }
        let len = storage.len()?;
        let back_at = len.saturating_sub(FOOTER_BYTES as u64);
        let got = storage.read_up_to(&mut bytes, HostOffset(back_at))?;
        let (mut back, mut back_at) = (Footer::parse(&bytes[..got]), back_at);
        if back.is_err() && got == FOOTER_BYTES && bytes[1..].starts_with(crate::footer::COOKIE) {
            back = Footer::parse(&bytes[1..]);
            back_at += 1;
        }
        Ok(Self { front, back, back_at })
    }

    /// The one to go by: that at the start where there is one, as QEMU does.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where there is none that is whole.
    pub(crate) fn best(&self, file: &str) -> Result<&Footer> {
        match (&self.front, &self.back) {
            (Ok(front), _) => Ok(front),
            (Err(_), Ok(back)) => Ok(back),
            (Err(_), Err(no)) => Err(Error::corrupt(
                file,
                self.back_at + no.at as u64,
                "footer",
                no.found.clone(),
                no.expected,
            )),
        }
    }

    /// What the user should know where only one of two is whole.
    pub(crate) fn warning(&self, file: &str) -> Option<String> {
        let footer = self.best(file).ok()?;
        if footer.disk_type == DiskType::Fixed {
            return None;
        }
        let mend = "run: vdkit check --repair all";
        match (&self.front, &self.back) {
            (Err(_), _) => {
                Some(format!("{file}: the footer's copy at its start is damaged; {mend}"))
            }
            (_, Err(_)) => {
                Some(format!("{file}: the footer at its end is damaged or gone; {mend}"))
            }
            (Ok(front), Ok(back)) if front != back => {
                Some(format!("{file}: the footer and its copy differ; {mend}"))
            }
            _ => None,
        }
    }
}
