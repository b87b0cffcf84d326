//! The formats at hand, and telling which one an image has.

use vdkit_block::{Error, FormatDriver, HostOffset, Probe, Result, Storage};

/// Bytes from the start of an image that drivers may judge it by.
const HEAD_BYTES: usize = 64 << 10;

/// The formats that can be opened. The facade holds the one with all of them.
#[derive(Clone, Debug, Default)]
pub struct Registry {
    drivers: Vec<&'static dyn FormatDriver>,
}

/// What an image was found to be.
#[derive(Clone, Copy, Debug)]
pub struct Probed {
    /// The format's driver.
    pub driver: &'static dyn FormatDriver,
    /// No magic number said so; nothing else fits (raw).
    pub fallback: bool,
}

impl Registry {
    /// A registry of these formats.
    pub fn new(drivers: impl IntoIterator<Item = &'static dyn FormatDriver>) -> Self {
        Self { drivers: drivers.into_iter().collect() }
    }

    /// The formats, in the order given.
    pub fn drivers(&self) -> impl Iterator<Item = &'static dyn FormatDriver> {
        self.drivers.iter().copied()
    }

    /// The driver of a format.
    pub fn find(&self, name: &str) -> Option<&'static dyn FormatDriver> {
        self.drivers().find(|driver| driver.name() == name)
    }

    /// The driver of a format that a user named.
    ///
    /// # Errors
    /// [`Error::Invalid`], listing the known formats.
    pub fn driver(&self, name: &str) -> Result<&'static dyn FormatDriver> {
        self.find(name).ok_or_else(|| {
            Error::Invalid(format!("unknown format '{name}'; known: {}", self.names()))
        })
    }

    /// The names of the formats, for messages.
    pub(crate) fn names(&self) -> String {
        self.drivers().map(FormatDriver::name).collect::<Vec<_>>().join(", ")
    }

    /// Tells an image's format from its first 64 KiB, with one read.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where no format fits, or where more than one magic number is there:
    /// then the user has to name the format, for a guess could hand out the wrong bytes. Whatever
    /// reading returns.
    pub fn probe(&self, storage: &dyn Storage) -> Result<Probed> {
        let mut head = vec![0; HEAD_BYTES];
        let got = storage.read_up_to(&mut head, HostOffset(0))?;
        head.truncate(got);
        self.probe_head(storage.name(), &head, storage.len()?)
    }

    fn probe_head(&self, file: &str, head: &[u8], len: u64) -> Result<Probed> {
        let mut certain = Vec::new();
        let mut fallback = None;
        for driver in self.drivers() {
            match driver.probe(head, len) {
                Probe::Yes => certain.push(driver),
                Probe::Fallback => fallback = fallback.or(Some(driver)),
                Probe::No => {}
            }
        }
        match certain.as_slice() {
            [driver] => Ok(Probed { driver: *driver, fallback: false }),
            [] => fallback.map(|driver| Probed { driver, fallback: true }).ok_or_else(|| {
                Error::unsupported(
                    file,
                    "its format is not recognised",
                    format!("name it with -f; known: {}", self.names()),
                )
            }),
            several => {
                let names: Vec<_> = several.iter().map(|driver| driver.name()).collect();
                Err(Error::unsupported(
                    file,
                    format!("it looks like {} at once", names.join(" and ")),
                    "name the format with -f",
                ))
            }
        }
    }
}
