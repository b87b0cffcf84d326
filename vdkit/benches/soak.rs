//! A long run of random operations on images of all kinds against a flat buffer. Each image is used
//! for thousands of operations, reopened, and checked by vdkit and QEMU.
//!
//! ```text
//! cargo bench -p vdkit --bench soak -- --seconds 300
//! cargo bench -p vdkit --bench soak -- --operations 1000000
//! cargo bench -p vdkit --bench soak -- --seed 7 --images 1     the image of that seed again
//! ```
//!
//! Each image has its own seed, which is printed. The first failure ends the run.

#[path = "../tests/support/mod.rs"]
mod support;

use std::time::{Duration, Instant};

use support::guest::Guest;
use support::ops::{self, Op};
use support::rig::Rig;
use support::shape::Shape;
use vdkit_chain::Disk;
use vdkit_testkit::Rng;

/// Limits of the run; the first one reached ends it.
struct Limits {
    seed: u64,
    seconds: u64,
    operations: u64,
    images: u64,
    /// Operations on one image.
    per_image: u64,
}

impl Limits {
    fn from_arguments() -> Self {
        let none = u64::MAX;
        let (seconds, operations, images) = (none, none, none);
        let mut limits =
            Self { seed: support::seed() >> 16, seconds, operations, images, per_image: 20_000 };
        let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
        while let Some(name) = arguments.next() {
            let value = arguments.next().and_then(|text| text.parse().ok());
            let value = value.unwrap_or_else(|| panic!("{name} needs a number"));
            match name.as_str() {
                "--seed" => limits.seed = value,
                "--seconds" => limits.seconds = value,
                "--operations" => limits.operations = value,
                "--images" => limits.images = value,
                "--per-image" => limits.per_image = value.max(1),
                _ => panic!(
                    "{name}: known are --seed, --seconds, --operations, --images, --per-image"
                ),
            }
        }
        if (limits.seconds, limits.operations, limits.images) == (none, none, none) {
            limits.seconds = 10;
        }
        limits
    }
}

/// Counts so far.
#[derive(Default)]
struct Done {
    images: u64,
    operations: u64,
    openings: u64,
    comparisons: u64,
}

/// An image under test.
struct Life<'a> {
    rig: Rig,
    guest: Guest,
    disk: Option<Disk>,
    done: &'a mut Done,
}

impl Life<'_> {
    fn disk(&self) -> &Disk {
        self.disk.as_ref().expect("open between openings")
    }

    fn compare(&mut self, what: &str) {
        self.done.comparisons += 1;
        self.rig.compare(self.disk(), &self.guest, what);
    }

    /// Closes the image, checks it (also by QEMU if `ask_qemu`), and reopens it.
    fn reopen(&mut self, ask_qemu: bool, what: &str) {
        if let Some(disk) = self.disk.take() {
            disk.close().expect("closing");
        }
        self.rig.audit(false, what);
        if ask_qemu {
            self.rig.ask_qemu(Some(&self.guest), false, what);
        }
        self.disk = Some(self.rig.open(true).expect("opening"));
        self.done.openings += 1;
    }

    fn operate(&mut self, op: Op, id: u64) {
        let shape = self.rig.shape.clone();
        let Some(disk) = &self.disk else { unreachable!("open between openings") };
        ops::apply(&shape, disk, &mut self.guest, op, id)
            .unwrap_or_else(|error| panic!("operation {id}, {op:x?}: {error}"));
    }
}

/// Runs the image of a seed to its end, or as far as the limits allow.
fn live(seed: u64, most: u64, until: Option<Instant>, done: &mut Done) {
    let mut rng = Rng::new(seed);
    let shape = Shape::random(&mut rng);
    println!("image {}: --seed {seed}: {shape:?}", done.images);
    let (rig, guest) = Rig::new(&shape);
    let mut life = Life { rig, guest, disk: None, done };
    life.reopen(false, "new");
    for id in 1..=most {
        let op = ops::random_step(&mut rng).on(&shape, life.guest.len());
        // Images are reopened every few hundred operations.
        if op != Op::Reopen {
            life.operate(op, id);
        } else if rng.chance(1, 16) {
            life.reopen(rng.chance(1, 20), &format!("before operation {id}"));
        }
        life.done.operations += 1;
        if rng.chance(1, 50) {
            life.compare(&format!("after operation {id}, {op:x?}"));
            if until.is_some_and(|until| Instant::now() >= until) {
                break;
            }
        }
    }
    life.compare("at the end");
    life.reopen(true, "at the end");
    life.compare("opened again");
    done.images += 1;
}

fn main() {
    let limits = Limits::from_arguments();
    let begin = Instant::now();
    let until = begin.checked_add(Duration::from_secs(limits.seconds));
    let mut done = Done::default();
    while done.images < limits.images
        && done.operations < limits.operations
        && begin.elapsed().as_secs() < limits.seconds
    {
        let most = limits.per_image.min(limits.operations - done.operations);
        live(limits.seed + done.images, most, until, &mut done);
    }
    let Done { images, operations, openings, comparisons } = done;
    println!(
        "{operations} operations on {images} images from --seed {}, {openings} openings, \
         {comparisons} comparisons of the whole disk, {:.0?}",
        limits.seed,
        begin.elapsed()
    );
}
