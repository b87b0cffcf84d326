//! The same command lines by two programs in twin folders: QEMU's `qemu-img` (the reference) and
//! vdkit under that name (the candidate).
//!
//! ```text
//!   images   a folder of images, made once by the reference
//!   cases    command lines: each option alone, in each spelling; pairs; wrong ones; names; sequences
//!   lines    those of them that no table of options gives
//!   around   processes that hold an image, another user, a file system without space
//!   twins    a case by both programs, each in a copy of the folder; what differs
//!   allowed  the one table of differences that may stay, each with its reason
//!   page     docs/qemu-compat.md, made from the cases and that table
//! ```

pub mod allowed;
mod around;
pub mod cases;
pub mod images;
mod lines;
pub mod page;
pub mod twins;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use allowed::Allowed;
use cases::Case;
use twins::{Difference, Twins};

/// The result of many cases.
#[derive(Debug, Default)]
pub struct Summary {
    /// Cases that were run.
    pub cases: usize,
    /// Cases in which something differs that the table does not allow.
    pub differing: Vec<(String, Vec<Difference>)>,
    /// How often each entry of the table was used.
    pub allowed: BTreeMap<&'static str, usize>,
}

impl Summary {
    /// Entries of the table that no case used.
    pub fn unused(&self) -> impl Iterator<Item = &'static Allowed> {
        allowed::ALL.iter().filter(|entry| !self.allowed.contains_key(entry.id))
    }

    /// The differing cases as text, the most frequent kinds first, at most `shown` of each kind.
    pub fn report(&self, shown: usize) -> String {
        let mut kinds: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (case, differences) in &self.differing {
            for one in differences {
                kinds.entry(one.kind()).or_default().push(format!("{case}\n{}", one.text()));
            }
        }
        let mut kinds: Vec<_> = kinds.into_iter().collect();
        kinds.sort_by_key(|(_, cases)| std::cmp::Reverse(cases.len()));
        let mut text = String::new();
        for (kind, cases) in kinds {
            text += &format!("=== {} times: {kind}\n", cases.len());
            for case in cases.iter().take(shown) {
                text += &format!("--- {case}\n");
            }
        }
        text + &format!(
            "{} cases, {} differ, {} differences allowed\n",
            self.cases,
            self.differing.len(),
            self.allowed.values().sum::<usize>()
        )
    }
}

/// Runs cases by both programs, on `threads` threads.
///
/// # Panics
/// The reference cannot make the images, or a folder cannot be made.
pub fn run(reference: &Path, candidate: &Path, cases: &[Case], threads: usize) -> Summary {
    let images = tempfile::tempdir().expect("a scratch folder");
    images::make(reference, images.path());
    run_on(images.path(), reference, candidate, cases, threads)
}

/// As [`run`], on images that [`images::make`] made.
///
/// # Panics
/// A program cannot be started, or a folder cannot be made.
pub fn run_on(
    images: &Path,
    reference: &Path,
    candidate: &Path,
    cases: &[Case],
    threads: usize,
) -> Summary {
    let (next, summary) = (AtomicUsize::new(0), Mutex::new(Summary::default()));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let twins = Twins::new(reference, candidate, images);
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let found = twins.run(case);
                    let mut summary = summary.lock().expect("no thread panics");
                    summary.cases += 1;
                    let mut left = Vec::new();
                    for one in found {
                        match allowed::ALL.iter().find(|entry| (entry.applies)(case, &one)) {
                            Some(entry) => *summary.allowed.entry(entry.id).or_default() += 1,
                            None => left.push(one),
                        }
                    }
                    if !left.is_empty() {
                        summary.differing.push((case.line(), left));
                    }
                }
            });
        }
    });
    summary.into_inner().expect("no thread panics")
}
