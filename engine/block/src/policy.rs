//! Which files an image's metadata may cause us to open.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// Allowed targets of references *inside* images. Names that the user typed are always allowed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum RefPolicy {
    /// Files beneath the folder of the referring image.
    #[default]
    OwnFolder,
    /// Files beneath the image's own folder or any of these.
    Folders(Vec<PathBuf>),
    /// None.
    Nothing,
    /// Those that the program allows.
    Ask(RefJudge),
}

/// Decides about each reference: given the name of the file that holds it and the reference as it
/// stands there, returns whether it may be followed, wherever it leads.
#[derive(Clone)]
pub struct RefJudge(Arc<Decide>);

type Decide = dyn Fn(&str, &str) -> bool + Send + Sync;

impl RefJudge {
    /// A judge by a function. It may be called from any thread.
    pub fn new(decide: impl Fn(&str, &str) -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(decide))
    }

    /// Whether `target`, which stands in the file `namer`, may be followed.
    pub fn allows(&self, namer: &str, target: &str) -> bool {
        (self.0)(namer, target)
    }
}

impl PartialEq for RefJudge {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for RefJudge {}

impl fmt::Debug for RefJudge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RefJudge(..)")
    }
}
