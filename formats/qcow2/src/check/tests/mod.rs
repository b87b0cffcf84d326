//! Compares checks and repairs of sound and damaged images with qemu-img.

mod compact;
mod crash;
mod damage;
mod extremes;
mod hostile;
mod matrix;
mod orphans;
mod random;
mod sound;
pub(super) mod support;
mod wiped;
