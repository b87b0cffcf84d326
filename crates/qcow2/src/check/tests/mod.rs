//! Against qemu-img: verdicts on sound and damaged images, and repairs.

mod compact;
mod crash;
mod damage;
mod hostile;
mod matrix;
mod random;
mod sound;
mod support;
