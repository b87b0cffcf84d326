#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vdkit_testkit::fuzz::vhd_ops(bytes));
