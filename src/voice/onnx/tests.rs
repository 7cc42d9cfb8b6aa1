use super::*;

/// Writes one length-delimited field.
fn field(number: u8, content: &[u8]) -> Vec<u8> {
    let mut out = vec![number << 3 | 2];
    let mut length = content.len();
    while length >= 0x80 {
        out.push((length & 0x7f) as u8 | 0x80);
        length >>= 7;
    }
    out.push(length as u8);
    out.extend_from_slice(content);
    out
}

fn tensor(name: &str, dims: &[u8], values: &[f32]) -> Vec<u8> {
    let raw: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    [field(1, dims), vec![2 << 3, 1], field(8, name.as_bytes()), field(9, &raw)].concat()
}

fn node(name: &str, operator: &str, inputs: &[&str], outputs: &[&str]) -> Vec<u8> {
    let inputs: Vec<u8> = inputs.iter().flat_map(|i| field(1, i.as_bytes())).collect();
    let outputs: Vec<u8> = outputs.iter().flat_map(|o| field(2, o.as_bytes())).collect();
    [inputs, outputs, field(3, name.as_bytes()), field(4, operator.as_bytes())].concat()
}

fn sample() -> Vec<u8> {
    let graph = [
        field(1, &node("same", "Identity", &["w"], &["w_again"])),
        field(1, &node("/a/MatMul", "MatMul", &["x", "w_again"], &["y"])),
        field(1, &node("/a/Add", "Add", &["b", "y"], &["z"])),
        field(5, &tensor("w", &[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])),
        field(5, &tensor("b", &[3], &[0.5, 0.25, 0.125])),
    ];
    field(7, &graph.concat())
}

fn open(bytes: &[u8]) -> (tempfile::TempDir, Result<Model, OnnxError>) {
    let dir = tempfile::tempdir().expect("temp dir");
    let path = dir.path().join("m.onnx");
    std::fs::write(&path, bytes).expect("write");
    let model = Model::open(&path);
    (dir, model)
}

#[test]
fn weights_are_found_by_node_name_through_aliases() {
    let (_dir, model) = open(&sample());
    let model = model.expect("opens");
    let mut binder = Binder::new(&model);
    let weight = binder.operand("/a/MatMul", &[Some(2), None]);
    let bias = binder.operand("/a/Add", &[weight.dim(1)]);
    binder.finish().expect("all fit");
    assert_eq!(model.tensor(&weight).unwrap().to_vec2::<f32>().unwrap(), [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]);
    assert_eq!(model.tensor(&bias).unwrap().to_vec1::<f32>().unwrap(), [0.5, 0.25, 0.125]);
}

#[test]
fn one_report_names_what_is_missing_misshapen_and_left_over() {
    let (_dir, model) = open(&sample());
    let model = model.expect("opens");
    let mut binder = Binder::new(&model);
    binder.operand("/a/MatMul", &[Some(7), None]);
    binder.operand("/gone/MatMul", &[None]);
    let report = binder.finish().expect_err("nothing fits").to_string();
    for part in ["`/a/MatMul`", "`w` is [2, 3], expected [7, any]", "`/gone/MatMul` is missing", "`b` is not used"] {
        assert!(report.contains(part), "{part} in {report}");
    }
}

#[test]
fn every_truncation_is_an_error_or_a_smaller_model() {
    let bytes = sample();
    for len in 0..bytes.len() {
        if let (_dir, Ok(model)) = open(&bytes[..len]) {
            panic!("{len} of {} bytes opened as {} nodes", bytes.len(), model.nodes.len());
        }
    }
}

#[test]
fn every_changed_byte_is_survived() {
    let bytes = sample();
    for at in 0..bytes.len() {
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut changed = bytes.clone();
            changed[at] = value;
            let (_dir, Ok(model)) = open(&changed) else { continue };
            let mut binder = Binder::new(&model);
            let weight = binder.operand("/a/MatMul", &[None, None]);
            if weight.dim(0).is_some() {
                model.tensor(&weight).expect("a bound weight can be read");
            }
        }
    }
}
