//! Against qemu-img: verdicts on sound and damaged images, and repairs.

mod compact;
mod crash;
mod damage;
mod hostile;
mod matrix;
mod orphans;
mod random;
mod sound;
mod support;
mod wiped;
