//! Against qemu-img: verdicts on sound and damaged images, and repairs.

mod damage;
mod sound;
mod support;
