//! A long run of many clients on one disk, with power cuts, faults, snapshots, bitmaps and resizes;
//! each image serves thousands of requests.
//!
//! ```text
//! cargo bench -p vdkit --bench endurance
//! cargo bench -p vdkit --bench endurance -- --ops 1000000 --seed 7 --shape qcow2-4k --clients 8
//! ```
//!
//! The first loss ends the run and prints the seed and the shape of its image.

use std::time::Instant;

use vdkit_testkit::concurrent::endurance::{Endurance, Totals};
use vdkit_testkit::concurrent::shape::{SHAPES, Shape};

fn from_arguments() -> Endurance {
    let mut endurance = Endurance { operations: 1_000_000, seed: 1, clients: 8, shape: None };
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    while let Some(name) = arguments.next() {
        let value = arguments.next().unwrap_or_default();
        let number = || value.parse().unwrap_or_else(|_| panic!("{name} needs a number"));
        match name.as_str() {
            "--ops" => endurance.operations = number(),
            "--seed" => endurance.seed = number(),
            "--clients" => endurance.clients = number().clamp(1, 100),
            "--shape" => endurance.shape = Some(shape(&value)),
            _ => panic!("{name}: known are --ops, --seed, --shape, --clients"),
        }
    }
    endurance
}

fn shape(name: &str) -> Shape {
    Shape::named(name).unwrap_or_else(|| {
        let names: Vec<&str> = SHAPES.iter().map(|shape| shape.name).collect();
        panic!("--shape {name}: known are {}", names.join(", "))
    })
}

fn main() {
    let endurance = from_arguments();
    let began = Instant::now();
    let Totals { images, operations, durable, cuts, survivors, faults, closed } =
        endurance.run().unwrap_or_else(|error| panic!("{error}"));
    println!("images {images}");
    println!("operations {operations}");
    println!("acknowledged durable changes {durable}");
    println!("power cuts {cuts}");
    println!("survivors judged {survivors}");
    println!("faults {faults}");
    println!("images closed {closed}");
    println!("seconds {:.1}", began.elapsed().as_secs_f64());
}
