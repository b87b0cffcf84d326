//! Which cells there are.

pub mod check;
pub mod compress;
pub mod durable;
pub mod encryption;
pub mod file;
mod nbd;
pub mod null;
pub mod serve;

use crate::pair::Cell;

/// Where a measured cell goes.
pub type Save<'a> = dyn FnMut(Cell) -> anyhow::Result<()> + 'a;
